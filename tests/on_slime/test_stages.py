"""slime's stages and queues on a Megatron-core without a RouterReplay; job.py says what is slime's.

The Megatron-core may have slime's patch in it or not: the figures are the same.
"""

from __future__ import annotations

from typing import Any

import pytest

import jobs
from on_slime.job import LENGTHS, MOE

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return jobs.run("on_slime.job:main", {})


def test_each_router_has_slimes_queue_which_is_asked_once_a_call_and_no_hook_of_slimes(
    results: dict[str, Any],
) -> None:
    """With slime's patch in Megatron too: it would ask a second time."""
    assert (results["replays"], results["hooks"]) == (sum(MOE), [0] * sum(MOE))
    assert results["r3"]["asked"] == [[len(LENGTHS), len(LENGTHS)]] * sum(MOE)


def test_what_fill_routing_replay_has_laid_out_or_was_recorded_is_replayed_recomputes_too(
    results: dict[str, Any],
) -> None:
    r3 = results["r3"]
    assert (r3["log_probs"], r3["update"]) == (True, True)
    assert r3["calls"] == [2 * len(LENGTHS)] * sum(MOE)
    assert not r3["own"], "the routers would have chosen the same: the test shows nothing"
    assert results["r2"] == {"update": True, "own": False}


def test_more_forwards_than_routes_and_a_wrong_stage_are_errors(results: dict[str, Any]) -> None:
    assert "after 0 were recorded" in results["replay_forward"]
    assert "'replay' is not a valid RouterReplayAction" in results["replay"]
