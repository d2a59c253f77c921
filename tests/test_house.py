"""The house: which room may import which, how large a module may be, and where a product may be named."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import filter as fnmatch_filter
from fnmatch import fnmatch
from pathlib import Path

import pytest

import npu_replay

PACKAGE = Path(npu_replay.__file__).parent
COMPAT = Path(npu_replay.compat.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "dev" / "architecture.md"

FLOORS = (
    ("errors", "lazy", "screen", "module_tree"),
    ("routes", "tables", "environment"),
    ("options", "torch_loading"),
    ("seam",),
    ("routers",),
    ("rollout",),
    ("sessions",),
    ("following",),
    ("parallel",),
    ("delivery",),
    ("compat.patching",),
    ("compat.probe",),
    ("compat.torch_npu", "compat.cuda", "compat.cpu", "compat.peft", "compat.ray"),
    ("compat.mindspeed", "compat.transformers"),
    ("compat.megatron",),
    ("compat.megatron_backports", "compat.vllm_ascend"),
    ("compat.vllm", "compat.sglang"),
    ("compat.engines",),
    ("compat.slime", "compat.swift", "compat.trainer_log"),
    ("compat.verl",),
    ("compat.roll",),
    ("devices",),
    ("doctor",),
    ("inspection",),
    ("smoke",),
    ("cli",),
)
"""The rooms, from the ground up: a room imports those below it, and of its own floor itself alone."""
ROOMS = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FACE = ROOMS["devices"]
"""From this floor on a room may use npu_replay as users do: `from npu_replay import record`."""
PRODUCTS = {
    "transformers",
    "megatron",
    "mindspeed",
    "torch_npu",
    "vllm",
    "vllm_ascend",
    "sglang",
    "verl",
    "peft",
    "trl",
    "roll",
    "swift",
    "ray",
}
ALSO = {
    "compat.megatron_backports": ("megatron",),
    "compat.trainer_log": ("transformers",),
    "compat.verl": ("megatron",),
    "compat.vllm_ascend": ("vllm",),
}
"""Products that a room imports besides the one it is named for."""
MOST_STATEMENTS = 275
"""Of one module, without docstrings."""


def modules() -> dict[str, Path]:
    """Every module that is shipped, «npu_replay.compat.probe»."""
    paths = {
        *PACKAGE.rglob("*.py"),
        *COMPAT.rglob("*.py"),
    }  # rglob follows no link, which compat/ is in a clone
    inside = {path: path.relative_to(PACKAGE.parent).with_suffix("").parts for path in sorted(paths)}
    return {".".join(part for part in parts if part != "__init__"): path for path, parts in inside.items()}


MODULES = modules()


@functools.cache  # when a test asks: who collects the tests reads no module
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(path: Path, *, for_types: bool = False) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import statement of a file; those for type checkers if they are asked for."""
    waiting: list[ast.AST] = [tree_of(path)]
    while waiting:
        node = waiting.pop()
        if not for_types and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node
        waiting += ast.iter_child_nodes(node)


def imported(path: Path, *, for_types: bool = False) -> set[str]:
    """Every module that a file imports, in full; a name of a package's is the package."""
    found: set[str] = set()
    for node in imports(path, for_types=for_types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{path} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else str(node.module) for name in names}
    return found


def room_of(module: str) -> str:
    """«routes», «compat.vllm»; empty for npu_replay itself, npu_replay.compat and __main__."""
    parts = module.split(".")[1:]
    room = ".".join(parts[: 2 if parts[:1] == ["compat"] else 1])
    return "" if room in ("", "compat", "__main__") else room


@functools.cache
def inside() -> dict[str, set[str]]:
    """Each module, and those of ours that it imports."""
    return {name: imported(path) & MODULES.keys() for name, path in MODULES.items()}


VAGUE = {"one", "found", "given", "said", "told", "held"}
"""Names that say nothing of the thing."""
LEFT = Counter(routes=1)
"""How many variables, parameters and fields still have such a name, by room. They may only become fewer."""


def test_a_variable_is_named_for_its_thing() -> None:
    named = Counter(
        room_of(module)
        for module, path in MODULES.items()
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE)
        or (isinstance(node, ast.arg) and node.arg in VAGUE)
    )
    assert named - LEFT == Counter()


def test_every_room_has_its_floor() -> None:
    assert {room_of(module) for module in MODULES} - {""} == ROOMS.keys()


@pytest.mark.parametrize("room", ROOMS)
def test_arrows_run_down(room: str) -> None:
    assert {
        f"{module} imports {one}"
        for module in MODULES
        if room_of(module) == room
        for one in inside()[module]
        if not (room_of(one) == room or (room_of(one) and ROOMS[room_of(one)] < ROOMS[room]))
        and not (one == "npu_replay" and ROOMS[room] >= FACE)
        and not (one == "npu_replay.compat" and ROOMS[room] >= FACE)
    } == set()


@pytest.mark.parametrize("module", MODULES)
def test_a_module_can_be_read_at_one_go(module: str) -> None:
    nodes = ast.walk(tree_of(MODULES[module]))
    docs = (ast.Expr, ast.Constant)
    count = sum(
        isinstance(node, ast.stmt) and (type(node), type(getattr(node, "value", None))) != docs
        for node in nodes
    )
    assert count <= MOST_STATEMENTS


def test_no_product_is_imported_outside_its_room() -> None:
    """And in its room only inside a function: npu_replay imports no framework."""
    for module, path in MODULES.items():
        for node in imports(path):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [str(node.module)]
            )
            for product in {name.partition(".")[0] for name in names} & PRODUCTS:
                owner = room_of(module)
                theirs = {owner.removeprefix("compat."), *ALSO.get(owner, ())}
                assert product in theirs or ROOMS[owner] >= FACE, (module, product)
                assert node.col_offset, f"{module} imports {product} at its top"


def test_the_architecture_page_has_a_line_for_every_module() -> None:
    """By package: a heading or row that names `routes/` is followed by the files in it."""
    table = "".join(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|"))
    told = set(re.findall(r"`([\w/*]+\.py)`", table))
    there = {
        name.removeprefix("npu_replay.").replace(".", "/") + ".py"
        for name, path in MODULES.items()
        if not path.stem.startswith("_")
    }
    assert {one for one in there if not any(fnmatch(one, line) for line in told)} == set()
    assert {line for line in told if not fnmatch_filter(there, line)} == set()
