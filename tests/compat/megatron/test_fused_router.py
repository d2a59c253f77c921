"""What goes wrong with the fused router. That it is recorded and replayed, on every release: tests/matrix."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fused_kernel
import npu_replay
from fused_kernel import FUSION
from npu_replay.errors import NoEffect, RecomputeError
from zoo.gpt import FULL, build

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]


@pytest.fixture
def kernel() -> Iterator[Any]:
    with fused_kernel.lent() as moe_utils:
        yield moe_utils


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
    assert kernel.fused_topk_with_score_function is drifting


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
