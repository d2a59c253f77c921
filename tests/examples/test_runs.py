"""What a user copies: each file in examples/ runs by its own command, and prints what it promises."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shown_examples import (
    FILES,
    ROOT,
    command,
    docstring,
    prints_what_it_promises,
    promised,
)

MOST_LINES = 127


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("megatron_r2", marks=[pytest.mark.megatron, pytest.mark.first_release]),
        # From 0.16 on it prints that the class is Megatron's own.
        pytest.param("megatron_api_on_0_12", marks=[pytest.mark.megatron, pytest.mark.first_release]),
        pytest.param("fsdp2_r3", marks=pytest.mark.distributed),
        pytest.param("shared_folder", marks=pytest.mark.distributed),
    ],
)
def test_an_example_prints_what_it_promises(name: str) -> None:
    prints_what_it_promises(ROOT / "examples" / f"{name}.py")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_is_short_and_says_how_to_run_it_and_what_it_prints(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    assert f"examples/{file.name}" in command(file)
    assert any(re.search(r"mismatch (with replay )?0\b", line) for line in promised(file))


def test_the_readme_has_a_row_for_each_with_its_command() -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"(?m)^\| \[([\w.]+)\]\(\w+\.py\) \|.*?\| `([^`]+)` \|", text))
    assert set(rows) == {file.name for file in FILES}
    for file in FILES:
        assert re.search(
            rf"(?m)^    (?:PYTHONPATH=\S+ )?{re.escape(rows[file.name])}(?: |$)", docstring(file)
        )
