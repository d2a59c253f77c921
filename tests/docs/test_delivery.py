"""docs/delivery.md: its loop over Ray runs, and its table is what the planner says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks import delivery as bench

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "delivery.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
(RAY,) = (one for one in BLOCKS if "import ray" in one)
(PLAN,) = (one for one in BLOCKS if "import plan" in one)
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
    for name, cells in {cells[0]: cells[1:] for cells in bench.table(planned).rows}.items():
        if name.startswith("of that"):
            continue
        line = next(line for line in TEXT.splitlines() if line.startswith(f"| {name} |"))
        assert [cell.strip() for cell in line.split("|")[2:-1]] == [
            "0" if cell == "0.00" else cell for cell in cells
        ]


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
    known = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    # A socket's path may not be long.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, script],
            env=known | {"RAY_TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.stdout.splitlines()[-1:] == ["right"], done.stderr
