"""The router's fused functions, made of small operators, as TransformerEngineNPU has them for now.

Signatures and results are those that Megatron-core's moe_utils relies on. A top-k over the experts is inside.
"""

from __future__ import annotations

from typing import Any

import torch


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
    """Return (probs, routing_map), each [rows, experts]: probabilities of the chosen experts, a bool map."""
    if score_function == "softmax":
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32) if use_pre_softmax else logits.float()
    elif score_function == "sigmoid":
        scores = torch.sigmoid(logits.float())
    else:
        raise ValueError(f"the score function should be softmax or sigmoid, and it is {score_function}")
    choosing = scores if expert_bias is None else scores + expert_bias
    if group_topk:
        choosing = _only_best_groups(choosing, topk, int(num_groups or 1), group_topk)
    values, ids = torch.topk(choosing, k=topk, dim=1)
    if expert_bias is not None:
        values = scores.gather(1, ids)
    if score_function == "softmax" and not use_pre_softmax:
        values = torch.softmax(values, dim=-1)
    elif score_function == "sigmoid" and topk > 1:
        values = values / (values.sum(dim=-1, keepdim=True) + 1e-20)
    if scaling_factor:
        values = values * scaling_factor
    probs = torch.zeros_like(logits).scatter(1, ids, values.type_as(logits))
    routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
    return probs, routing_map


def _only_best_groups(scores: torch.Tensor, topk: int, num_groups: int, group_topk: int) -> torch.Tensor:
    """Lower the scores of all experts outside the best groups to -inf."""
    rows = scores.shape[0]
    by_group = scores.view(rows, num_groups, -1)
    strength = by_group.topk(topk // group_topk, dim=-1).values.sum(dim=-1)
    best = torch.topk(strength, k=group_topk, dim=-1).indices
    kept = torch.zeros_like(strength, dtype=torch.bool).scatter(1, best, True)
    return scores.masked_fill(~kept.repeat_interleave(by_group.shape[-1], dim=1), float("-inf"))


def fused_moe_aux_loss(*_: Any, **__: Any) -> Any:
    """A name that Megatron-core imports; no test turns on the fusion with an aux loss."""
    raise NotImplementedError("the stand-in of TransformerEngineNPU computes no aux loss")


fused_compute_score_for_moe_aux_loss = fused_moe_aux_loss
