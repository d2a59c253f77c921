"""The house: which room may import which, how large a module may be, and where a product may be named.

A ceiling holds today's number. A change that makes one smaller lowers its ceiling; none is raised.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from fnmatch import filter as fnmatch_filter
from fnmatch import fnmatch
from pathlib import Path

import pytest
from torch import nn

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
    targets: set[str] = set()
    for node in imports(path, for_types=for_types):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        else:
            assert node.level == 0, f"{path} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            targets |= {name if name in MODULES else str(node.module) for name in names}
    return targets


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
        f"{module} imports {target}"
        for module in MODULES
        if room_of(module) == room
        for target in inside()[module]
        if not (room_of(target) == room or (room_of(target) and ROOMS[room_of(target)] < ROOMS[room]))
        and not (target == "npu_replay" and ROOMS[room] >= FACE)
        and not (target == "npu_replay.compat" and ROOMS[room] >= FACE)
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
    patterns = set(re.findall(r"`([\w/*]+\.py)`", table))
    there = {
        name.removeprefix("npu_replay.").replace(".", "/") + ".py"
        for name, path in MODULES.items()
        if not path.stem.startswith("_")
    }
    assert {path for path in there if not any(fnmatch(path, line) for line in patterns)} == set()
    assert {line for line in patterns if not fnmatch_filter(there, line)} == set()


# Ceilings

LEVELS = 3
"""The most classes of ours above each other."""
BUILT_OF_PARTS = {"seam", "sessions", "following"}
SESSION_LEVELS = 2
"""The same in BUILT_OF_PARTS, which are put together of parts."""

TORCHS = {*vars(nn.Module()), "_version"}
"""Private attributes that are torch's own."""


def test_no_modules_need_each_other() -> None:
    """Also by what they import for type checkers alone."""
    needs = {name: imported(path, for_types=True) & MODULES.keys() for name, path in MODULES.items()}
    faces = {"npu_replay", "npu_replay.compat"}
    graphlib.TopologicalSorter({name: needs[name] - faces for name in needs}).prepare()


def test_private_parts_that_another_room_uses() -> None:
    used = {
        f"{module}: {ast.unparse(node)}"
        for module, node in private_parts_of_others(MODULES, room_of)
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }
    assert used == set()


def private_parts_of_others(
    modules: Iterable[str], home: Callable[[str], str]
) -> Iterator[tuple[str, ast.Attribute]]:
    """Where a module uses a private part that no module of its own `home` defines, and another one does."""
    owners: dict[str, set[str]] = defaultdict(set)
    for module in modules:
        for name in private_names(tree_of(MODULES[module])):
            owners[name].add(home(module))
    for module in modules:
        for node in ast.walk(tree_of(MODULES[module])):
            if not isinstance(node, ast.Attribute) or not is_private(node.attr) or node.attr in TORCHS:
                continue
            if owners[node.attr] and home(module) not in owners[node.attr]:
                yield module, node


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private names that a module defines, as functions, classes, variables or attributes of self."""
    for node in ast.walk(tree):
        name = node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr if ast.unparse(node.value) == "self" else ""
        if is_private(name):
            yield name


@functools.cache
def classes() -> dict[tuple[str, str], ast.ClassDef]:
    return {
        (module, node.name): node
        for module, path in MODULES.items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    }


def test_levels_of_classes() -> None:
    """How far a class is from the first of ours that it inherits from, at most."""
    bases = defaultdict(set)
    for (_, name), node in classes().items():
        bases[name] |= {ast.unparse(base).rpartition(".")[2] for base in node.bases}

    def level(name: str) -> int:
        return 1 + max((level(base) for base in bases[name] & bases.keys() - {name}), default=0)

    deepest = max(bases, key=level)
    assert level(deepest) == LEVELS, deepest
    assert (
        max(map(level, {name for module, name in classes() if room_of(module) in BUILT_OF_PARTS}))
        == SESSION_LEVELS
    )


def test_sessions_are_put_together_of_parts() -> None:
    """Who reads one file of these rooms needs no private part of another."""
    of_rooms = [module for module in MODULES if room_of(module) in BUILT_OF_PARTS]
    used = private_parts_of_others(of_rooms, lambda module: module)
    assert {f"{module}: {ast.unparse(node)}" for module, node in used} == set()
