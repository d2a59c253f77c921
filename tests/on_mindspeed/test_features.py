"""npu_replay on every feature of MindSpeed that reaches into MoE layers, forward, recompute and backward.

Each case runs a small GPT three times over: untouched, recorded and replayed; worker.py says how. The
stand-in has the features that route, or recompute, in a way of their own. A real MindSpeed has to have them
all, but for those that some of its branches lack.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from on_mindspeed import processes
from on_mindspeed.feature_cases import CASES, Case

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.first_release,
    pytest.mark.slow,
    pytest.mark.timeout(700),
]

WORKER = "worker:features"
NOT_IN_STAND_IN = {
    # They change no routing, or don't so in the stand-in.
    *("capacity", "permute_fusion", "permute_fusion_ep2", "zero_memory_level0", "zero_memory_level1"),
    "balanced_moe",
}
MAY_LACK = {
    # mc2 came after 2.3; core_r0.15.3 and core_r0.16.0 have neither it nor fix_router
    "alltoall_mc2",
    "capacity",
    "fix_router",
}
BROKEN_UPSTREAM = (
    # MindSpeed core_r0.16.0 on Megatron 0.16: its layers don't take what Megatron now passes
    "takes from 2 to 3 positional arguments but 4 were given when instantiating MindSpeedA",
    "transformer_block_forward_backward_overlaping() got an unexpected keyword argument 'rotary_pos_cos_sin'",
)
"""How a model fails that nobody has touched; nothing of it can then be said."""
TOLERANCE = 1e-5
"""Of float32 sums in another order, relative to the largest gradient."""


@functools.cache
def group(product: str, world: int) -> list[dict[str, Any]]:
    """The answers of all cases with this number of processes, one dictionary a rank."""
    left_out = NOT_IN_STAND_IN if product == processes.STAND_IN else ()
    cases = [name for name, case in CASES.items() if case.world == world and name not in left_out]
    return processes.run_ranks(product, WORKER, {"cases": cases}, world, timeout=600)


@pytest.mark.parametrize("name", CASES)
def test_replay_follows_the_record_in_forward_and_recompute(product: str, name: str) -> None:
    case = CASES[name]
    if product == processes.STAND_IN and name in NOT_IN_STAND_IN:
        pytest.skip(f"the stand-in has no {name} of its own")
    answers = [rank[name] for rank in group(product, case.world)]
    if "absent" in answers[0]:
        may_lack = MAY_LACK if product == processes.REAL else {"alltoall_mc2", "fix_router"}
        assert name in may_lack, f"{product} must have this feature: {answers[0]}"
        pytest.skip(f"{product} has no {name}: {answers[0]}")
    if "unsupported" in answers[0]:
        pytest.skip(answers[0]["unsupported"])  # alltoall_seq went after Megatron 0.12
    if product == processes.REAL and any(one in answers[0].get("broken", "") for one in BROKEN_UPSTREAM):
        pytest.skip(f"the untouched model fails: {answers[0]}")
    # Refused alike on every rank, but 2.3.0 can't build tp_extend_ep's experts on a CPU on the second.
    for rank in answers[:1] if case.refused else answers:
        assert "raised" not in rank, rank["raised"]
        assert "broken" not in rank, rank["broken"]
        assert case.shows in " ".join(rank["moe_layer"]), "the feature wasn't on"
        if case.refused:
            assert case.refused in rank["refused"]
            continue
        assert "refused" not in rank, rank["refused"]
        check(case, rank)
        # MindSpeed 2.3.0 itself gives other gradients than Megatron, by some 4 %.
        own = product == processes.REAL and name == "allgather_overlap" and is_old(product)
        if case.reference and not case.own_gradients and not own:
            assert rank["agrees_with_reference"] < TOLERANCE, rank["apart_from_reference"]


def is_old(product: str) -> bool:
    """Is this MindSpeed one of 2.3.0 or older? Those lack mc2."""
    return "absent" in group(product, CASES["alltoall_mc2"].world)[0]["alltoall_mc2"]


def check(case: Case, rank: dict[str, Any]) -> None:
    assert rank["record"] == 0, "recording changed a loss or a gradient"
    assert rank["recorded_is_shown"] == 0, "the record holds other ids than the routers' outputs showed"
    calls = [2 if case.recompute else 1] * (3 * len(rank["layers"]))
    assert rank["calls"] == calls, "not every router ran once in each forward and once in each recompute"
    assert rank["replay"] == 0, "replaying the record changed a loss or a gradient"
    assert rank["live_differs"] > 0, "the changed routers chose as before, so the next line says nothing"
    assert rank["replayed_differs"] == 0, "a replay chose other experts, in a forward or in a recompute"
    assert rank["replayed_calls"] == calls
    assert rank["foreign_differs"] == 0
    assert rank["foreign_moves"] > 1e-3, "foreign routes moved no gradient, so the next line says nothing"
    if not (case.own_gradients and case.recompute):
        assert rank["agrees_without_recompute"] == 0
        assert rank["foreign"] == 0, "foreign routes give other gradients with recompute than without"
