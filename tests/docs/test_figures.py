"""The figures that pages show are those of a file, or of what prints them."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import delivery
from examples.demo import tables as demo_tables
from npu_replay import tables

ROOT = Path(__file__).parents[2]
BOTH = ["README.md", "README.zh.md"]
PAGES_OF_GRPO = [("docs/grpo.md", "bfloat16"), ("docs/dev/tried.md", "coarse"), ("docs/dev/tried.md", "fsdp")]


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", BOTH)
def test_the_status_line_is_what_was_sent(page: str) -> None:
    """A run on an NPU is claimed once a report of one lies in docs/dev/verified, and not before."""
    reports = [
        json.loads(file.read_text(encoding="utf-8")) for file in (ROOT / "docs/dev/verified").glob("*.json")
    ]
    machines = {(report["machine"]["device"], report["machine"]["name"]) for report in reports}
    assert machines == {("cpu", ""), ("cuda", "NVIDIA H100 80GB HBM3")}, "say so in both READMEs, and here"
    lines = {
        "README.md": "The core has run\non one NVIDIA H100; nothing has run on a real NPU yet",
        "README.zh.md": "核心部分已在一块 NVIDIA H100 上运行；尚未在真实 NPU 上运行",
    }
    assert lines[page] in text_of(page)


@pytest.mark.parametrize("page", BOTH)
def test_the_figures_of_grpo_are_those_of_the_run(page: str) -> None:
    text = text_of("docs/grpo.md").split("## In large models")[0]
    rows = {"no replay": "none", "无重放": "none", "R2": "R2", "R3": "R3"}
    table = re.findall(r"(?m)^\| (no replay|无重放|R2|R3) \| (.+) \|$", text_of(page))
    assert len(table) == 3
    for arm, cells in table:
        line = next(line.split() for line in text.splitlines() if line.startswith(rows[arm] + " "))
        reward, _, kl, tau2, mismatch, in_the_update, ratio = line[1:8]
        columns = cells.split(" | ")
        figures = [float(cell.rstrip(" %")) for cell in columns[:3]]
        assert figures == [float(figure.rstrip("%")) for figure in (mismatch, in_the_update, kl)]
        assert [cell.replace(" ", "") for cell in columns[3:]] == [tau2, ratio, reward]


@pytest.mark.parametrize("page", BOTH)
def test_the_output_of_the_demo_is_that_of_its_run(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printed = tables.as_text(demo_tables.parts(json.loads(text_of("docs/dev/demo.json"))))
    (shown,) = re.findall(r"(?s)```text\n(Rollout: .+?)```", text_of(page))
    assert printed.startswith(shown)


@pytest.mark.parametrize(("page", "name"), PAGES_OF_GRPO)
def test_a_table_of_grpo_is_what_the_example_prints_of_its_file(
    page: str, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "grpo"))
    monkeypatch.setenv("COLUMNS", "200")
    importlib.import_module("curves").show(json.loads(text_of(f"docs/grpo/{name}.json")))
    shown = re.findall(r"```text\n(.*?)\n```", text_of(page), re.DOTALL)
    assert capsys.readouterr().out.strip("\n") in shown


def shares(text: str) -> list[list[int]]:
    """The percentages of each line that says what the routers choose and what was used."""
    return [[int(share) for share in line] for line in re.findall(r"own choice (\d+)%, used (\d+)%", text)]


def first_block(page: str) -> str:
    """Return the first block that can run by itself."""
    blocks = re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL)
    return next(block for block in blocks if "import npu_replay\n" in block)


@pytest.mark.slow
def test_the_figures_of_readmes_r2_are_those_that_it_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """A replay that is shown does something."""
    code = first_block("README.md")
    exec(compile(code, "README.md", "exec"), {})
    shown = shares(code)
    printed = shares(capsys.readouterr().out)
    assert shares(first_block("README.zh.md")) == shown
    assert shown[0] == printed[0] == [0, 0]
    assert shown[1][1] == printed[1][1] == 0
    assert shown[1][0] == pytest.approx(printed[1][0], abs=8), "sums differ between processors"
    assert printed[1][0] > 20


def test_the_table_of_delivery_is_what_the_planner_says(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of("docs/delivery.md")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (plan,) = (block for block in blocks if "import plan" in block)
    known: dict[str, Any] = {}
    exec(compile(plan, "delivery.md", "exec"), known)
    planned = known["planned"]
    once = planned.once
    assert capsys.readouterr().out == f"{once.sent} {once.node_held.max()} {once.link(0, 1)}\n"
    for name, cells in {cells[0]: cells[1:] for cells in delivery.table(planned).rows}.items():
        if name.startswith("of that"):
            continue
        line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
        assert [cell.strip() for cell in line.split("|")[2:-1]] == [
            "0" if cell == "0.00" else cell for cell in cells
        ]
