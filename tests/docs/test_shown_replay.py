"""A replay that is shown does something: the figures beside it come from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)


def figures(text: str) -> list[list[int]]:
    """The percentages of each line that says what the routers choose and what was used."""
    return [[int(share) for share in line] for line in re.findall(r"own choice (\d+)%, used (\d+)%", text)]


def first_block(page: str) -> str:
    """Return the first block that can run by itself."""
    blocks = BLOCK.findall((ROOT / page).read_text(encoding="utf-8"))
    return next(block for block in blocks if "import npu_replay\n" in block)


@pytest.mark.slow
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
