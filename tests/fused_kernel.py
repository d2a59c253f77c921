"""A stand-in for Transformer Engine's fused router, which needs CUDA: its signature, its results, no top-k.

Written from the call in Megatron-core's moe_utils: (logits, topk, use_pre_softmax, num_groups, group_topk,
scaling_factor, score_function, expert_bias) -> (probs [rows, experts], routing_map bool [rows, experts]).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

FUSION = {"moe_router_fusion": True}


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Counts its calls in `calls`."""
    calls.append(len(logits))
    before = score_function == "sigmoid" or use_pre_softmax
    scores = _scores(logits, score_function) if before else logits
    choosing = scores if expert_bias is None else scores + expert_bias
    if group_topk:
        choosing = choosing.masked_fill(
            ~_in_best_groups(choosing, topk, int(num_groups or 1), group_topk), -1e9
        )
    ids = choosing.detach().argsort(dim=1, descending=True, stable=True)[:, :topk]
    values = scores.gather(1, ids)
    if not before:
        values = torch.softmax(values, dim=-1, dtype=torch.float32).type_as(logits)
    elif score_function == "sigmoid" and topk > 1:
        values = values / (values.sum(dim=-1, keepdim=True) + 1e-20)
    if scaling_factor:
        values = values * scaling_factor
    routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    return torch.zeros_like(logits).scatter(1, ids, values.type_as(logits)), routing_map


calls: list[int] = []


def _scores(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    if score_function == "sigmoid":
        return torch.sigmoid(logits.float()).type_as(logits)
    return torch.softmax(logits, dim=-1, dtype=torch.float32).type_as(logits)


def _in_best_groups(scores: torch.Tensor, topk: int, groups: int, group_topk: int) -> torch.Tensor:
    """bool [rows, experts]: does the expert lie in one of the row's best groups?"""
    by_group = scores.detach().view(len(scores), groups, -1)
    best = by_group.sort(dim=-1, descending=True).values[..., : topk // group_topk].sum(dim=-1)
    chosen = best.argsort(dim=1, descending=True, stable=True)[:, :group_topk]
    inside = torch.zeros_like(best, dtype=torch.bool).scatter(1, chosen, True)
    return inside.unsqueeze(-1).expand_as(by_group).reshape(scores.shape)


def contrary(
    logits: torch.Tensor, topk: int, *options: Any, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Chooses the experts that nobody else would. Counts its calls too."""
    calls.append(len(logits))
    least = logits.argsort(dim=1, stable=True)[:, :topk]
    routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, least, True)
    return logits.masked_fill(~routing_map, -torch.inf).softmax(dim=1), routing_map


def product() -> Any:
    """Megatron's moe_utils, of a release that has a fused router."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import TransformerConfig

    if "moe_router_fusion" not in TransformerConfig.__dataclass_fields__:
        pytest.skip("this Megatron-core has no fused router: 0.14 is the first")
    return moe_utils


@contextmanager
def lent(kernel: Callable[..., Any] = fused_topk_with_score_function) -> Iterator[Any]:
    """Put it where Transformer Engine's would be; a release before 0.14 has no place for it."""
    moe_utils = product()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_utils, "HAVE_TE", True, raising=False)
        patch.setattr(moe_utils, "fused_topk_with_score_function", kernel, raising=False)
        calls.clear()
        yield moe_utils


def in_function(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The same kernel as one autograd.Function, as Transformer Engine's is."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: torch.Tensor, options: dict[str, Any]) -> Any:
            with torch.enable_grad():
                ctx.logits = logits.detach().requires_grad_()
                ctx.probs, routing_map = kernel(logits=ctx.logits, **options)
            ctx.mark_non_differentiable(routing_map)
            return ctx.probs.detach(), routing_map

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return *torch.autograd.grad(ctx.probs, ctx.logits, grads[0]), None

    def fused(logits: torch.Tensor, **options: Any) -> Any:
        return Fused.apply(logits, options)

    return fused
