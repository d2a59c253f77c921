"""ci/contracts.py: every way in which a release can break a contract is one line, on made-up sources.

The real releases are checked by the script itself, in CI a few (ci/engines.sh), by hand all.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CI = Path(__file__).parents[2] / "ci"

CONTRACTS = '''
[engine]
first = "0.13.0"
ci = ["0.14.0"]

[engine.contract.rows]
says = "the rows of a completion"
[[engine.contract.rows.clause]]
since = "0.14.0"
file = "engine/outputs.py"
code = """
class CompletionOutput:
    token_ids: ...
    routed_experts: np.ndarray | None = None
"""

[engine.contract."prompt rows"]
says = "the prompt's rows apart"
[[engine.contract."prompt rows".clause]]
since = "0.21.0"
until = "0.22.0"
file = "engine/outputs.py"
code = """
class RequestOutput:
    prompt_routed_experts: ...
"""

[engine.contract.encoding]
says = "base64 of .npy"
[[engine.contract.encoding.clause]]
since = "0.14.0"
until = "0.28.0"
file = "engine/serving.py"
code = "np.save(buf, output.routed_experts)"
[[engine.contract.encoding.clause]]
since = "0.28.0"
file = "engine/utils.py"
code = """
def numpy2base64(array):
    np.save(..., array, allow_pickle=False)
"""
'''

OUTPUTS = """
class CompletionOutput:
    token_ids: list[int]
    routed_experts: np.ndarray | None = None
"""
SERVING = "def full(output):\n    np.save(buf, output.routed_experts)\n"
UTILS = (
    "def numpy2base64(array, order='C'):\n    with io.BytesIO() as b:\n"
    "        np.save(b, array, allow_pickle=False)\n"
)
OLD = {"engine/outputs.py": OUTPUTS, "engine/serving.py": SERVING}
NEW = {"engine/outputs.py": OUTPUTS, "engine/utils.py": UTILS}


@pytest.fixture(scope="module")
def contracts() -> Iterator[ModuleType]:
    """ci/contracts.py, which imports its neighbours by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CI))
        yield importlib.import_module("contracts")


@pytest.fixture
def check(contracts: ModuleType) -> Callable[..., dict[str, list[str] | None]]:
    """What comes of the engine's contracts, in a release of these files; of a line what is before « do, »."""
    engine = contracts.products(CONTRACTS)["engine"]

    def check(version: str, files: Mapping[str, str]) -> Any:
        found = engine.check(contracts.Version(version), files.get)
        return {
            name: lines and [line.partition(" do, ")[0] for line in lines] for name, lines in found.items()
        }

    return check


# ---- what a stub says


@pytest.mark.parametrize(
    ("stub", "source", "line"),
    [
        ("class A: ...", "class B: ...", "no class A"),
        ("class A(Base): ...", "class A(Other): ...", "A is no Base"),
        ("@dataclass\nclass A: ...", "@other\nclass A: ...", "A is no @dataclass"),
        (
            "class A:\n  def f(self):\n    g()",
            "class Base:\n  def f(self):\n    g()\nclass A(Base):\n  def f(self): ...",
            "A.f has no `g()`",
        ),
        ("class A:\n  x: int", "class A:\n  y: int", "A has no field x"),
        ("class A:\n  x: int", "class A:\n  x: str", "A.x is of type `str`, not `int`"),
        ("class A:\n  x: int = 0", "class A:\n  x: int = 1", "A.x is `1` by default, not `0`"),
        ("class A:\n  x: int = 0", "class A:\n  x: int", "A.x is nothing by default, not `0`"),
        ("class A:\n  def f(self): ...", "class A: ...", "A has no method f"),
        ("def f(a): ...", "def g(a): ...", "no function f"),
        ("def f(a): ...", "def f(b=0): ...", "f has no argument a"),
        ("def f(a): ...", "def f(a, b): ...", "f wants an argument b"),
        ("def f(a=0): ...", "def f(a=1): ...", "f has a `1` by default, not `0`"),
        ("def f(a, b): ...", "def f(b, a): ...", "f has its arguments in another order: b, a"),
        ("def f():\n  g(1)", "def f():\n  g(2)", "f has no `g(1)`"),
        ("def f():\n  g(...)", "def f():\n  h(1)", "f has no `g(...)`"),
        ("def f():\n  g(1, ...)", "def f():\n  g(2, 3)", "f has no `g(1, ...)`"),
        ("def f():\n  g(..., k=1)", "def f():\n  g(0, k=2)", "f has no `g(..., k=1)`"),
        (
            "def f():\n  a(...)\n  b(...)",
            "def f():\n  b()\n  a()",
            "f has `b(...)` before `a(...)`, not after it",
        ),
        ("from m import a", "from m import b", "it doesn't import a from m"),
        ("a.b", "a.c", "the module has no `a.b`"),
        ("x: ...", "y = 1", "no name x"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(
    contracts: ModuleType, stub: str, source: str, line: str
) -> None:
    assert contracts.differences(stub, source) == [line]


@pytest.mark.parametrize(
    ("stub", "source"),
    [
        ("class A:\n  x: ...", "class A:\n  def __init__(self):\n    self.x = 1"),
        ("class A:\n  x: ...", "class Base:\n  x: int = 0\nclass A(Base): ..."),
        ("@dataclass\nclass A: ...", "@final\n@dataclass\nclass A: ..."),
        (
            "class A:\n  def f(self):\n    g()",
            "class Base:\n  def f(self): ...\nclass A(Base):\n  def f(self):\n    g()",
        ),
        ("class A:\n  x: ... = 0", "if True:\n  class A:\n    x: int = 0"),
        ("def f(a): ...", "async def f(a, b=1, *, c=2): ..."),
        ("def f(a, **_): ...", "def f(self, a, b): ..."),
        ("def f(): ...", "@overload\ndef f(a): ...\ndef f(): ..."),
        ("def f():\n  x = g(...)", "def f():\n  if 1:\n    x = g(1, two=2)"),
        ("def f():\n  a(...)\n  b(...)", "def f():\n  a()\n  b()\n  a()"),
        ("def f():\n  ...((n, k), ..., dtype=d)", "def f():\n  self.x = zeros((n, k), dtype=d, device=0)"),
        ("from m import a", "def f():\n  from m import b, a as c"),
    ],
)
def test_what_is_there_in_another_guise_is_found(contracts: ModuleType, stub: str, source: str) -> None:
    assert contracts.differences(stub, source) == []


def test_a_source_of_another_python_is_a_line_too(contracts: ModuleType) -> None:
    assert "can't parse it" in contracts.differences("x: ...", "def f(:")[0]


# ---- what a release is held to


KEPT = {"rows": [], "prompt rows": None, "encoding": []}


@pytest.mark.parametrize(
    ("version", "files", "found"),
    [
        ("0.20.0", OLD, {}),
        ("0.34.0", NEW, {}),  # a release of tomorrow is held to the newest range
        ("0.28.0rc1", OLD, {}),  # a candidate comes before its release
        (
            "0.34.0",
            NEW | {"engine/outputs.py": OUTPUTS.replace("routed_experts", "expert_ids")},
            {"rows": ["engine/outputs.py: CompletionOutput has no field routed_experts"]},
        ),
        ("0.34.0", {"engine/outputs.py": OUTPUTS}, {"encoding": ["engine/utils.py: no such file"]}),
        (
            "0.34.0",
            NEW | {"engine/outputs.py": OUTPUTS + "class RequestOutput:\n    prompt_routed_experts: list\n"},
            {
                "prompt rows": [
                    "engine/outputs.py: holds «prompt rows» as releases from 0.21.0 to before 0.22.0"
                ]
            },
        ),
        (
            "0.34.0",
            NEW | OLD,
            {"encoding": ["engine/serving.py: holds «encoding» as releases from 0.14.0 to before 0.28.0"]},
        ),
    ],
)
def test_what_a_release_is_held_to(
    check: Any, version: str, files: dict[str, str], found: dict[str, list[str]]
) -> None:
    lines = {name: [f"engine {version}: {line}" for line in those] for name, those in found.items()}
    assert check(version, files) == KEPT | lines


def test_what_other_releases_may_hold_too(contracts: ModuleType) -> None:
    text = CONTRACTS.replace('until = "0.28.0"\n', 'until = "0.28.0"\nelsewhere = true\n')
    engine = contracts.products(text)["engine"]
    assert engine.check(contracts.Version("0.34.0"), (NEW | OLD).get)["encoding"] == []


# ---- which releases are looked at


@pytest.mark.parametrize(
    ("names", "everything", "expected"),
    [
        ([], False, ["0.14.0"]),
        (["engine"], True, ["0.13.0", "0.14.0", "0.34.0"]),
        (["engine==0.12.0"], True, ["0.12.0"]),
    ],
)
def test_releases_that_are_asked_for(
    contracts: ModuleType, names: list[str], everything: bool, expected: list[str]
) -> None:
    def versions(package: str) -> list[Any]:
        return [contracts.Version(one) for one in ("0.12.0", "0.13.0", "0.14.0", "0.34.0")]

    asked = contracts.asked(names, everything, contracts.products(CONTRACTS), versions)
    assert [str(version) for _, version in asked] == expected


def test_candidates_and_nightly_builds_can_be_left_out(contracts: ModuleType) -> None:
    text = CONTRACTS.replace("[engine]\n", "[engine]\ncandidates = false\n", 1)
    versions = [contracts.Version(one) for one in ("0.14.0rc1", "0.14.0", "0.15.0rc0.dev12", "0.15.0.post1")]
    for candidates, expected in ((text, [False, True, False, True]), (CONTRACTS, [True] * 4)):
        product = contracts.products(candidates)["engine"]
        assert [product.looks_at(one) for one in versions] == expected


def test_a_product_that_is_not_known(contracts: ModuleType) -> None:
    with pytest.raises(SystemExit, match="motor==1: give PACKAGE or PACKAGE==VERSION, of engine"):
        list(contracts.asked(["motor==1"], False, contracts.products(CONTRACTS), None))


def test_the_releases_of_ci_are_not_older_than_the_first_one(contracts: ModuleType) -> None:
    known = contracts.products((CI / "contracts.toml").read_text(encoding="utf-8"))
    assert sorted(known) == ["megatron-core", "sglang", "vllm", "vllm-ascend"]
    for product in known.values():
        assert product.ci
        assert min(product.ci) >= product.first
