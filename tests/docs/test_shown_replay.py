"""A replay that is shown does something: routers have a choice, and the figures beside it come from it."""

from __future__ import annotations

import ast
import contextlib
import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import npu_replay

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
EXPERTS = ("num_experts", "num_moe_experts", "num_local_experts", "n_routed_experts")
CHOSEN = ("num_experts_per_tok", "moe_router_topk", "topk")
SIZES = {"hidden_size", "moe_intermediate_size", "num_hidden_layers"}
"""A dict with one of these is handed to a model's config."""


def shown() -> Iterator[tuple[str, str]]:
    """Name and code of each Python block of a page, each docstring's examples and each file in examples/."""
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]:
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            yield str(page.relative_to(ROOT)), block
    for file in [*ROOT.glob("npu_replay/**/*.py"), *ROOT.glob("compat/**/*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                examples = doctest.DocTestParser().get_examples(ast.get_docstring(node) or "")
                yield str(file.relative_to(ROOT)), "".join(one.source for one in examples)
    for file in ROOT.glob("examples/**/*.py"):
        yield str(file.relative_to(ROOT)), file.read_text(encoding="utf-8")


def models(code: str) -> Iterator[tuple[int | None, int | None]]:
    """Experts, and how many of them a token takes, of each call or dict that gives a model's sizes.

    None where a size is no number, and 0 chosen where they are left to the config's default.
    """
    tree = ast.parse(code)
    constants = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                constants |= {ast.unparse(one): value for one, value in zip(names, values, strict=False)}
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                constants[name] = value

    def number(value: ast.expr) -> int | None:
        found = constants.get(ast.unparse(value), value)
        return found.value if isinstance(found, ast.Constant) and isinstance(found.value, int) else None

    for node in ast.walk(tree):
        match node:
            case ast.Call(func=func, keywords=keywords):
                sizes = {one.arg: number(one.value) for one in keywords if one.arg}
                builds_a_model = ast.unparse(func).endswith("Config")
            case ast.Dict(keys=keys, values=values):
                named = zip(keys, values, strict=True)
                sizes = {key.value: number(one) for key, one in named if isinstance(key, ast.Constant)}
                builds_a_model = bool(SIZES & sizes.keys())
            case _:
                continue
        experts, chosen = (
            [size for name, size in sizes.items() if name in wanted] for wanted in (EXPERTS, CHOSEN)
        )
        if experts and (chosen or builds_a_model):
            yield experts[0], chosen[0] if chosen else 0


def test_every_model_that_is_shown_has_more_experts_than_a_token_takes() -> None:
    """With as many, a token takes every expert: such a replay replays nothing, and no figure tells."""
    found = [(name, *sizes) for name, code in shown() for sizes in models(code)]
    assert {"README.md", "docs/zh/quickstart.md", "examples/megatron_r2.py", "examples/grpo/task.py"} <= {
        name for name, *_ in found
    }
    assert "npu_replay/rollout/turns.py" in {name for name, *_ in found}
    unsaid = {name for name, _, chosen in found if chosen == 0}
    assert unsaid == set(), "a config's own top-k may be all experts: show one"
    assert [one for one in found if None not in one and one[2] >= one[1]] == []


def test_a_default_that_takes_every_expert_is_seen() -> None:
    assert list(models("Qwen3MoeConfig(hidden_size=64, num_experts=8)")) == [(8, 0)]
    assert list(models("E, K = 8, 8\nConfig(num_moe_experts=E, moe_router_topk=K)")) == [(8, 8)]
    assert list(models("RoutedExperts(ids=ids, layers=[0], num_experts=8)")) == []


@contextlib.contextmanager
def counted_alone(model: Any, routes: Any, **_: Any) -> Iterator[Any]:
    """In the place of `replay`: the routers choose by themselves."""
    with npu_replay.observe(model) as seen:
        yield SimpleNamespace(
            metrics=lambda: {"live_mismatch": npu_replay.compare(routes, seen.shown).router_mismatch}
        )


def figures(text: str) -> list[list[int]]:
    """The percentages of each line that says what the routers choose and what was used."""
    lines = re.findall(r"own choice (\d+)%, used (\d+)%", text)
    return [[int(one) for one in line] for line in lines]


def first_block(page: str) -> str:
    """Return the first block that can run by itself."""
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    return next(block for block in blocks if "import npu_replay\n" in block)


def test_the_figures_of_readmes_r2_are_those_that_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    code = first_block("README.md")
    exec(compile(code, "README.md", "exec"), {})
    said = figures(code)
    printed = figures(capsys.readouterr().out)
    assert figures(first_block("README.zh.md")) == said
    assert said[0] == printed[0] == [0, 0]
    assert said[1][1] == printed[1][1] == 0
    assert said[1][0] == pytest.approx(printed[1][0], abs=8), "sums differ between processors"
    assert printed[1][0] > 20


def test_without_the_replay_readmes_r2_prints_other_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npu_replay, "replay", counted_alone)
    exec(compile(first_block("README.md"), "README.md", "exec"), {})
    _, (own, used) = figures(capsys.readouterr().out)
    assert used == own > 20


def test_the_figures_of_the_quickstart_are_those_that_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    pages = [first_block(page) for page in ("docs/quickstart.md", "docs/zh/quickstart.md")]
    said, also_said = (re.findall(r"print\(round\(.*#\D*(0\.0)\D+(0\.\d\d)", code) for code in pages)
    assert also_said == said
    exec(compile(pages[0], "docs/quickstart.md", "exec"), {})
    first, second = map(float, capsys.readouterr().out.split())
    assert first == 0
    assert second == pytest.approx(float(said[0][1]), abs=0.08)
