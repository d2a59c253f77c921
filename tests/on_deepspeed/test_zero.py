"""DeepSpeed's ZeRO over two processes: `record` and `replay` around its engine, or the module in it."""

from __future__ import annotations

import pytest

import jobs
from on_deepspeed.zero_worker import CASES

pytest.importorskip("deepspeed", reason="ci/trainers.sh trl runs these tests, with DeepSpeed")
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


def test_every_stage_uses_the_recorded_experts_in_forward_and_recompute() -> None:
    found = jobs.by_case("on_deepspeed.zero_worker:main", 2)
    assert found == {case: ["", ""] for case in CASES}
