"""ROLL's own fsdp2 strategy over gloo, one process and two. cases.py says what runs, job.py what is lent.

Not run, for want of what they take: its pipelines (Ray, a rollout engine), CPU offload (pinned memory),
flash-attn, whose sequence-parallel attention the ids don't depend on.
"""

from __future__ import annotations

import pytest

import jobs
from on_roll import cases

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1200)]
ENV = {"NPU_REPLAY_MIN_OVERLAP": "0"}
"""R3's routes are such as no router would choose."""


@pytest.fixture(scope="module")
def found() -> dict[int, list[dict[str, str]]]:
    return {}


def _check(found: dict[int, list[dict[str, str]]], ranks: int, every: tuple[str, ...], case: str) -> None:
    if ranks not in found:
        found[ranks] = jobs.run_ranks("on_roll.cases:main", {"cases": every}, ranks, env=ENV, timeout=1000)
    problems = [one.get(case, "not run: a case before it failed") for one in found[ranks]]
    assert not any(problems), "\n\n".join(problems)


@pytest.mark.parametrize("case", cases.ALONE)
def test_rolls_own_strategy_alone(found: dict[int, list[dict[str, str]]], case: str) -> None:
    _check(found, 1, cases.ALONE, case)


@pytest.mark.parametrize("case", cases.CASES)
def test_rolls_own_strategy_in_two_processes(found: dict[int, list[dict[str, str]]], case: str) -> None:
    _check(found, 2, tuple(cases.CASES), case)
