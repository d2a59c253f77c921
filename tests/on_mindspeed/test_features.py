"""npu_replay on every feature of MindSpeed that reaches into MoE layers, forward, recompute and backward.

Each case runs a small GPT untouched, recorded and replayed; worker.py says how, and judges it. The
stand-in has the features that route, or recompute, in a way of their own. A real MindSpeed has to have them
all, but for those that some of its branches lack.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from on_mindspeed import processes
from on_mindspeed.feature_cases import CASES
from on_mindspeed.stand_in.mindspeed.branch import BRANCH

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.first_release,
    pytest.mark.slow,
    pytest.mark.timeout(700),
]

WORKER = "worker:features"
OF_2_3_0 = {
    *("none", "grouped_gemm", "alltoall_seq", "alltoall_seq_tp2", "alltoall_overlap"),
    *("fb_overlap", "fb_overlap_no_recompute", "fb_overlap_dense_first"),
}
"""What the stand-in plays of it: the others change no routing. How core_r0.18.0's layers are mended isn't
known."""
NEWEST = {name for name in CASES if name.startswith(("score_reuse", "fast_ops"))}
"""Features that core_r0.18.0 got after July. mc2 came after 2.3."""
BROKEN_UPSTREAM = (
    # MindSpeed core_r0.16.0 on Megatron 0.16: its layers don't take what Megatron now passes
    "takes from 2 to 3 positional arguments but 4 were given when instantiating MindSpeedA",
    "transformer_block_forward_backward_overlaping() got an unexpected keyword argument 'rotary_pos_cos_sin'",
    # MindSpeed core_r0.18.0 of July on Megatron 0.18: what it imports, calls or refuses isn't adapted yet
    "No module named 'megatron.core.transformer.moe.legacy_a2a_token_dispatcher'",
    "MoEAlltoAllTokenDispatcher.__init__() got an unexpected keyword argument 'pg_collection'",
    "MindSpeed --moe-grouped-gemm is not adapted to Megatron 0.18",
)
"""How a model fails by itself; that it does so without npu_replay is tried each time."""


def answers_of(product: str, name: str, **how: Any) -> list[dict[str, Any]]:
    """What each rank has to say of a case: {} if all is right.

    On a real MindSpeed a case has processes of its own: one that it can't do may leave its patches half made.
    """
    world = CASES[name].world
    cases = _played(world) if product == processes.STAND_IN else (name,)
    return [rank[name] for rank in group(product, world, cases, **how)]


def _played(world: int) -> tuple[str, ...]:
    """The cases of the stand-in with this number of processes."""
    return tuple(name for name, case in CASES.items() if case.world == world and is_played(name))


def is_played(name: str) -> bool:
    """Does the stand-in play this case?"""
    if BRANCH.over_megatron_adaptor:
        return name.startswith("score_reuse") or name == "none"
    return name in (("none",) if BRANCH.restores_methods else OF_2_3_0)


@functools.cache
def group(product: str, world: int, cases: tuple[str, ...], **how: Any) -> list[dict[str, Any]]:
    """The answers of these cases, which share their processes; one dictionary a rank."""
    return processes.run_ranks(product, WORKER, {"cases": cases, **how}, world, timeout=600)


@pytest.mark.parametrize("name", CASES)
def test_replay_follows_the_record_in_forward_and_recompute(product: str, name: str) -> None:
    if product == processes.STAND_IN and not is_played(name):
        pytest.skip(f"the stand-in has no {name} of its own")
    answers = answers_of(product, name)
    if "absent" in answers[0]:
        may_lack = product == processes.REAL and name in NEWEST | {"alltoall_mc2"}
        assert may_lack, f"{product} must have this feature: {answers[0]}"
        pytest.skip(f"{product} has no {name}: {answers[0]}")
    if "unsupported" in answers[0]:
        pytest.skip(answers[0]["unsupported"])  # alltoall_seq went after Megatron 0.12
    if product == processes.REAL and "broken" in answers[0]:
        skip_what_fails_by_itself(name, answers[0]["broken"])
    assert answers == [{}] * CASES[name].world


def skip_what_fails_by_itself(name: str, error: str) -> None:
    """Skip a case whose model fails in the same way where npu_replay has changed nothing in the process."""
    known = [message for message in BROKEN_UPSTREAM if message in error]
    assert known, error
    alone = answers_of(processes.REAL, name, untouched=True)[0]
    assert known[0] in alone.get("broken", ""), f"only with npu_replay: {error}; without: {alone}"
    pytest.skip(f"MindSpeed fails by itself: {error}")
