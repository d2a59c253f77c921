"""docs/delivery.md: its loop over Ray runs, and its table is what the planner says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

import npu_replay
from benchmarks import delivery as bench
from benchmarks.delivery_plan import plan

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "delivery.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
(RAY,) = (one for one in BLOCKS if "import ray" in one)
(PLAN,) = (one for one in BLOCKS if "import plan" in one)
COSTS = (ROOT / "docs" / "dev" / "performance.md").read_text(encoding="utf-8")
ROUTES = """
import torch, npu_replay
def routes_of(seed):
    ids = torch.rand(9 + seed, 4, 8, generator=torch.Generator().manual_seed(seed)).topk(2).indices
    return npu_replay.RoutedExperts(ids=ids, layers=range(4), num_experts=8)
"""


def test_the_table_is_what_the_planner_says(capsys: pytest.CaptureFixture[str]) -> None:
    known: dict[str, Any] = {}
    exec(compile(PLAN, "delivery.md", "exec"), known)
    planned = known["planned"]
    once = planned.once
    assert capsys.readouterr().out == f"{once.sent} {once.node_held.max()} {once.link(0, 1)}\n"
    shown = {cells[0]: cells[1:] for cells in bench.table(planned).rows}
    for name, cells in shown.items():
        if name.startswith("of that"):
            continue
        line = next(line for line in TEXT.splitlines() if line.startswith(f"| {name} |"))
        assert [cell.strip() for cell in line.split("|")[2:-1]] == [
            "0" if cell == "0.00" else cell for cell in cells
        ]


def test_the_smaller_jobs_are_what_the_planner_says() -> None:
    layout = npu_replay.ParallelLayout(tp=2, pp=2, dp=4, decoder=npu_replay.DecoderLayers(48))
    told = re.findall(r"(?m)^\| ([\d,]+) of ([\d,]+) \| (.+) \|$", TEXT)
    assert len(told) == 2
    for samples, length, said in told:
        count, tokens = (int(one.replace(",", "")) for one in (samples, length))
        planned = plan(layout, [tokens] * count, topk=8, num_experts=128, rollout_nodes=2)
        figures = (planned.today.sent, planned.once.sent, planned.today.collected)
        assert [f"{float(f'{one / 1e9:.3g}'):g}" for one in figures] == said.split(" | ")


def test_what_verls_batches_carry_is_what_the_planner_says() -> None:
    known: dict[str, Any] = {}
    exec(compile(PLAN, "delivery.md", "exec"), known)
    marks = known["planned"].marks
    driver, sent, held = (one / 1e9 for one in (marks.collected, marks.sent, marks.node_held.max()))
    assert f"{driver:.2f} GB in the driver, {sent:.1f} GB between nodes, {held:.2f} GB on a node" in TEXT


def test_the_measured_plan_is_that_of_the_run() -> None:
    layout = npu_replay.ParallelLayout(tp=2, pp=2, dp=2, decoder=npu_replay.DecoderLayers(48))
    planned = plan(layout, [8192] * 16, topk=8, num_experts=128, ranks_a_node=4)
    held = 3 * planned.once.put_held // 2  # it puts half of all, and is sent half of the other half
    assert f"| {planned.once.sent / 1e6:.1f} MB |" in COSTS
    assert f"| {held / 1e6:.1f} MB |" in COSTS


@pytest.mark.slow
def test_the_loop_over_ray_gives_back_what_was_put(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="Ray isn't installed: pip install ray")
    script = tmp_path / "loop.py"
    check = """
for pp_rank, rows in enumerate(stages):
    layers = (2 * pp_rank, 2 * pp_rank + 1)
    wanted = npu_replay.RoutedExperts.concat([routes_of(seed).only(layers) for seed in range(4)])
    assert rows.ids.equal(wanted.ids), rows
print("right")
"""
    script.write_text(ROUTES + RAY + check)
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # a socket's path may not be long
    known = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    try:
        done = subprocess.run(
            [sys.executable, script],
            env=known | {"RAY_TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.stdout.splitlines()[-1:] == ["right"], done.stderr
