"""npu_replay on every feature of MindSpeed that reaches into MoE layers, and in any order of imports.

Each case of a feature runs a small GPT untouched, recorded and replayed, forward, recompute and backward;
worker.py says how, and judges it. The stand-in has the features that route, or recompute, in a way of their
own. A real MindSpeed has to have them all, but for those that some of its branches lack.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from on_mindspeed import processes
from on_mindspeed.feature_cases import CASES
from on_mindspeed.stand_in.mindspeed.branch import BRANCH

pytestmark = [pytest.mark.megatron, pytest.mark.slow]


@pytest.fixture(params=[processes.STAND_IN, pytest.param(processes.REAL, marks=pytest.mark.mindspeed)])
def product(request: pytest.FixtureRequest) -> str:
    """What a test runs on: the stand-in that lies here, and a real MindSpeed where there is one."""
    if request.param == processes.REAL and not processes.real_mindspeed():
        pytest.skip("mindspeed is not importable: put MindSpeed and Megatron-LM's source tree on PYTHONPATH")
    return request.param


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


@pytest.mark.first_release
@pytest.mark.timeout(700)
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
    pytest.skip(f"MindSpeed fails by itself: {known[0]}")


# Orders of imports, and repatches at any time: npu_replay before, between and after the other two, with and
# without a repatch right after MindSpeed's import. In each process, one after the other: no repatch after the
# model was built, one, one between record and replay, a model that was built after them, with full recompute
# throughout. Then what becomes of a config's flags in the hands of MindSpeed and of people, and what is left
# after uninstall().

NPU = "npu_replay"
MIND = "mindspeed"
MEGATRON = "megatron"
ORDERS = [  # MindSpeed's import imports Megatron, so only npu_replay may still come after an early repatch
    ((NPU, MIND, MEGATRON), ""),
    pytest.param((MIND, NPU, MEGATRON), "early", marks=pytest.mark.first_release),
    pytest.param((MEGATRON, NPU, MIND), "", marks=pytest.mark.first_release),
    pytest.param((NPU, MEGATRON, MIND), "", marks=pytest.mark.first_release),
    pytest.param((MEGATRON, MIND, NPU), "early", marks=pytest.mark.first_release),
]
KEPT: dict[str, Any] = {
    "not given": False,
    "given": True,
    "the other name": True,
    "copy": True,
    "deepcopy": True,
    "asdict": True,
    "signature": True,
    "on the class": False,
    "repatch": True,
    "repatch with arguments": True,
    "the arguments too": 4,
}


@pytest.mark.parametrize(
    ("order", "early"), ORDERS, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_any_order_of_imports_keeps_flags_and_replays(
    product: str, order: tuple[str, ...], early: str
) -> None:
    """T5; and a wrap that a repatch throws away, a class attribute or signature that MindSpeed trips on."""
    task = {"order": order, "early": early}
    (results,) = processes.run_ranks(product, "worker:orders", task, 1, timeout=280)
    assert results["torch restored"]
    lost = {
        when: [flag for flag in kept if kept[flag] is not True] for when, kept in results["flags"].items()
    }
    assert not any(lost.values()), lost
    for name in ("TransformerConfig", "MLATransformerConfig"):
        ways = dict(results[name])
        own = ways.pop("subclass")
        bare = ways.pop("subclass, nothing given")
        assert ways == KEPT, name
        # MindSpeed up to 2.3.0 lets nobody build a subclass of his own, with a flag or without.
        assert own is True or ("AttributeError" in own and own == bare), name
    assert results["undone"] == [False, False]
