"""compat.verl.metrics: the line that replay is on, which an operator has to see, and the figures."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from npu_replay.compat.verl.metrics import COUNTED, figures, summary

SUMS = {"routers": 4, "replayed": 4, "ranks": 1, "routed": 8, "rows": 8}


def test_the_line_counts_the_routers_of_all_stages_and_says_100_percent_of_all_rows_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "megatron.core.parallel_state", raising=False)
    assert summary("R3", SUMS) == "R3: 4 routers, 4 replayed, 100% of rows had a route, 1 rank"
    state = ModuleType("megatron.core.parallel_state")
    state.model_parallel_is_initialized = lambda: True  # type: ignore[attr-defined]
    state.get_pipeline_model_parallel_world_size = lambda: 2  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    line = summary("R2", SUMS | {"ranks": 2, "rows": 100_000, "routed": 99_999})
    assert line == "R2: 4 routers, 4 replayed, 99.99% of rows had a route, 2 ranks agree"


def test_figures_are_of_all_ranks_and_left_out_where_nothing_was_counted() -> None:
    counted = dict.fromkeys(COUNTED, 0) | SUMS | {"ranks": 2, "microseconds": 3_000_000, "bytes": 5_000_000}
    always = {"rows_without_route": 0.0, "bad_samples": 0.0, "seconds": 1.5, "megabytes": 2.5}
    assert figures(counted) == {f"npu_replay/{name}": value for name, value in always.items()}
    compared = {"compared": 4, "differing": 1, "given": 8, "shared": 4, "chosen": 10, "dropped": 2}
    more = {"live_mismatch": 0.25, "overlap": 0.5, "capacity_dropped": 0.2}
    assert figures(counted | compared) == {
        f"npu_replay/{name}": value for name, value in (always | more).items()
    }
