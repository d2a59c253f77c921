"""ROLL's own fsdp2 strategy over gloo, one process and two. cases.py says what runs, job.py what is lent.

Not run, for want of what they take: its pipelines (Ray, a rollout engine), CPU offload (pinned memory),
flash-attn, whose sequence-parallel attention the ids don't depend on.
"""

from __future__ import annotations

import pytest

from case_jobs import Notes, check, noted
from on_roll import cases

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Notes:
    return noted(request, tmp_path_factory, "on_roll.cases", ranks=1)


@pytest.fixture(scope="module")
def together(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Notes:
    return noted(request, tmp_path_factory, "on_roll.cases", ranks=2)


@pytest.mark.parametrize("case", cases.ALONE)
def test_rolls_own_strategy_alone(alone: Notes, case: str) -> None:
    check(alone, case)


@pytest.mark.parametrize("case", cases.CASES)
def test_rolls_own_strategy_in_two_processes(together: Notes, case: str) -> None:
    check(together, case)
