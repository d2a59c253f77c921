"""What a user copies: each file in examples/ runs by its own command, and prints what it promises."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

import npu_replay
from shown_examples import (
    FILES,
    LAUNCHERS,
    ROOT,
    command,
    docstring,
    launched,
    prints_what_it_promises,
    promised,
)

MOST_LINES = 127
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")


def example(name: str) -> Path:
    return ROOT / "examples" / f"{name}.py"


@pytest.mark.slow
@pytest.mark.megatron
def test_r2_in_a_megatron_loop() -> None:
    prints_what_it_promises(example("megatron_r2"))


@pytest.mark.slow
@pytest.mark.megatron
@pytest.mark.first_release
def test_megatrons_own_api_on_the_oldest_release() -> None:
    """From 0.16 on it prints that the class is Megatron's own."""
    prints_what_it_promises(example("megatron_api_on_0_12"))


@pytest.mark.slow
@pytest.mark.distributed
def test_r3_under_fsdp2() -> None:
    prints_what_it_promises(example("fsdp2_r3"))


@pytest.mark.slow
@pytest.mark.distributed
def test_the_page_about_fsdp2_shards_its_model_under_torchrun(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "fsdp2.md").read_text(encoding="utf-8")
    block, *_ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    copy = tmp_path / "page.py"
    copy.write_text(block + "\nassert (ratio == 1).all()\nprint(type(next(model.parameters())).__name__)\n")
    done = launched([*LAUNCHERS["torchrun"], "--nproc-per-node", "2", str(copy)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("DTensor") == 2, done.stdout


@pytest.mark.slow
@pytest.mark.distributed
def test_routes_through_a_shared_folder() -> None:
    prints_what_it_promises(example("shared_folder"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_is_short_and_says_how_to_run_it_and_what_it_prints(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= MOST_LINES
    assert f"examples/{file.name}" in command(file)
    assert any(re.search(r"mismatch (with replay )?0\b", line) for line in promised(file))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_file_uses_public_names_alone(file: Path) -> None:
    """Those of npu_replay.__all__, and of its packages what the API page lists."""
    text = file.read_text(encoding="utf-8")
    names = set(re.findall(r"\bnpu_replay\.(\w+)", text))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "npu_replay":
            folder = str(node.module).partition(".")[2]
            listed = {alias.name for alias in node.names if f"\n| `{folder}.{alias.name}` |" in API}
            names |= {alias.name for alias in node.names} - listed
    assert names
    assert names <= set(npu_replay.__all__)


def test_the_readme_has_a_row_for_each_with_its_command() -> None:
    text = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"(?m)^\| \[([\w.]+)\]\(\w+\.py\) \|.*?\| `([^`]+)` \|", text))
    assert set(rows) == {file.name for file in FILES}
    for file in FILES:
        assert re.search(
            rf"(?m)^    (?:PYTHONPATH=\S+ )?{re.escape(rows[file.name])}(?: |$)", docstring(file)
        )
    scripts = {file.name for file in (ROOT / "examples" / "verl").glob("*.sh")}
    assert set(re.findall(r"(?m)^\| \[([\w.]+\.sh)\]\(verl/\1\) \|", text)) == scripts


@pytest.mark.parametrize("script", sorted((ROOT / "examples").rglob("*.sh")), ids=lambda file: file.stem)
def test_a_script_is_bash_and_says_where_it_ran(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    head = script.read_text(encoding="utf-8").split("set -euo")[0]
    assert re.search(r"verl 0\.[789](?s:.)*# Not run on", head)
