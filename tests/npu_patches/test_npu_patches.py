"""Qwen3-MoE's block as verl, ms-swift and ROLL have it on an NPU: their code over stand-ins of operators."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

import jobs
import needed

STUBS = Path(__file__).parents[1] / "stubs"
LAYERS = 3
BATCHES = 2


@pytest.fixture(scope="module", params=["verl", "swift", "roll"])
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    if needed.missing(request.param):
        pytest.skip(f"no {request.param} on the path: ci/verl.sh puts verl and ms-swift there")
    if request.param == "roll" and transformers.__version__ >= "5":
        pytest.skip("ROLL changes the block of transformers 4 alone")
    return jobs.run(
        "npu_patches.job:run",
        {"whose": request.param},
        path=[STUBS],
        env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )


def test_the_stand_ins_compute_what_the_stock_block_does(results: dict[str, Any]) -> None:
    assert results["block"].startswith(("verl.", "swift.", "roll."))
    assert results["from stock"] < 1e-4


@pytest.mark.parametrize("checkpoint", ["none", "non-reentrant", "reentrant"])
def test_experts_multiply_the_rows_that_are_recorded_and_those_of_the_routes(
    results: dict[str, Any], checkpoint: str
) -> None:
    passes = 1 if checkpoint == "none" else 2
    assert results[checkpoint] == {
        "bit-equal": True,
        "wrongly recorded": 0,
        "wrongly replayed": 0,
        "own choice is other": LAYERS * BATCHES,
        "calls": LAYERS * BATCHES * passes,
    }
