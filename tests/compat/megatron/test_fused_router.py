"""The fused router: recorded from what its kernel returned, replayed past it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fused_kernel
import npu_replay
from fused_kernel import FUSION
from npu_replay.errors import NoEffect, RecomputeError
from zoo.gpt import CAPACITY, FULL, SIGMOID_BIAS, build, perturbed, same

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

VARIANTS: dict[str, dict[str, Any]] = {
    "softmax_after_topk": {},
    "groups_sigmoid_bias": SIGMOID_BIAS | {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "capacity": CAPACITY,
}


@pytest.fixture
def kernel() -> Iterator[Any]:
    with fused_kernel.lent() as moe_utils:
        yield moe_utils


@pytest.mark.parametrize(
    ("variant", "recompute"), [*zip(VARIANTS, [None, "full", "layers_non_reentrant"], strict=True)]
)
def test_a_record_is_bit_equal_to_the_fused_run_and_its_replay_gives_the_same_ids(
    kernel: Any, variant: str, recompute: str | None
) -> None:
    """T45, N1."""
    fused = build(VARIANTS[variant] | FUSION, recompute)
    unfused = build(VARIANTS[variant], recompute)
    untouched = fused.run("sum")
    with npu_replay.record(fused.model) as recording:
        assert same(fused.run("sum"), untouched)
    with npu_replay.record(unfused.model) as expected:
        plain = unfused.run("sum")
    for ours, theirs in zip(recording.routes, expected.routes, strict=True):
        assert torch.equal(ours.ids, theirs.ids.sort(dim=-1).values), "in ascending order"
    assert untouched[0] == pytest.approx(plain[0])

    with perturbed(fused.model), perturbed(unfused.model):
        fused_kernel.calls.clear()
        with npu_replay.replay(fused.model, recording.routes):
            given = fused.run("sum")
        assert not fused_kernel.calls, "a replay goes past the kernel"
        with npu_replay.replay(unfused.model, recording.routes):
            assert same(given, unfused.run("sum"))
    assert kernel.fused_topk_with_score_function is fused_kernel.fused_topk_with_score_function
    fused.run("sum")
    assert fused_kernel.calls, "and afterwards through it again"


def test_a_recompute_that_falls_the_other_way_is_an_error(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T35: the kernel can't be given the ids of its forward, so it is watched."""
    trainer = build(FUSION | FULL)

    def drifting(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        scale = -1.0 if torch._C._current_graph_task_id() != -1 else 1.0
        return fused_kernel.fused_topk_with_score_function(logits * scale, *args, **kwargs)

    monkeypatch.setattr(kernel, "fused_topk_with_score_function", drifting)
    with (
        pytest.raises(RecomputeError, match=r"other experts in a recompute.*moe_router_fusion=False"),
        npu_replay.pin_recompute(trainer.model),
    ):
        trainer.run("each")


def test_a_kernel_of_another_kind_is_an_error_that_says_so(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build(FUSION)
    monkeypatch.setattr(kernel, "fused_topk_with_score_function", lambda logits, **_: logits)
    with pytest.raises(NoEffect, match="output can't be read"), npu_replay.record(trainer.model):
        trainer.loss(trainer.batches[0])


def test_a_fused_path_of_somebody_elses_is_refused_in_the_first_micro_batch(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.moe import router as product

    def elsewhere(logits: torch.Tensor, topk: int, **_: Any) -> Any:
        return fused_kernel.fused_topk_with_score_function(
            logits, topk, False, None, None, None, "softmax", None
        )

    trainer = build(FUSION)
    monkeypatch.setattr(product, "topk_routing_with_score_function", elsewhere)
    with (
        pytest.raises(NoEffect, match=r"moe_router_fusion=True, and a kernel other than"),
        npu_replay.record(trainer.model),
    ):
        trainer.loss(trainer.batches[0])


def test_without_transformer_engine_megatron_says_what_is_missing() -> None:
    fused_kernel.product()
    trainer = build(FUSION)
    with pytest.raises(ValueError, match="install TE"), npu_replay.record(trainer.model):
        trainer.loss(trainer.batches[0])
