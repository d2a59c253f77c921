"""The figures of a step, under the names that the field has for them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from roads import together

import npu_replay

if TYPE_CHECKING:
    from batches import Batch
    from loop import Old, Update

    from npu_replay import RoutedExperts


def row(
    step: int,
    rewards: torch.Tensor,
    batches: Sequence[Batch],
    old: Old,
    updates: Sequence[Update],
    clip: float,
) -> dict[str, Any]:
    """Over all ranks. Of ratios: those of the update against the old log-probs."""
    apart = together(torch.cat(old.log_probs) - torch.cat([batch.rollout for batch in batches]))
    ratios = together(torch.cat([update.log_ratio for update in updates])).exp()
    first = together(updates[0].log_ratio)
    shown = [update.shown for update in updates]
    router_mismatch, token_mismatch = mismatch([batch.routes for batch in batches], old.shown)
    update_mismatch, _ = mismatch([batch.routes for batch in batches], shown)
    figures = {
        "step": step,
        "reward": float(together(rewards).mean()),
        "rollout_train_k3_kl": float((apart.exp() - 1 - apart).mean()),
        "extreme_frac_tau2": float((apart.abs() > math.log(2)).float().mean()),
        "largest_difference": float(apart.abs().max()),
        "first_ratio_is_1": bool((first == 0).all()),
        "ratio_max": float(ratios.max()),
        "clip_fraction": float(((ratios < 1 - clip) | (ratios > 1 + clip)).float().mean()),
        "gradient_norm": sum(update.gradient_norm for update in updates) / len(updates),
        "entropy": float(together(torch.cat(old.entropy)).mean()),
        "tokens": len(apart),
        "router_mismatch": router_mismatch,
        "token_mismatch": token_mismatch,
        "update_mismatch": update_mismatch,
    }
    if replayed := [routes for routes in old.routes if routes is not None]:
        figures["replay_mismatch"], _ = mismatch(replayed, shown)  # R2: with its own record
    return figures


def mismatch(routes: Sequence[RoutedExperts], shown: Sequence[RoutedExperts]) -> tuple[float, float]:
    """The shares of token-layers, and of tokens, at which this trainer's routers showed other experts."""
    counts = []
    for comparison in (npu_replay.compare(*pair) for pair in zip(routes, shown, strict=True)):
        tokens = comparison.token_layers // len(comparison.layer_mismatch)
        counts.append(
            [comparison.differing, comparison.token_layers, round(comparison.token_mismatch * tokens), tokens]
        )
    differing, token_layers, with_one, tokens = together(counts).sum(dim=0).tolist()
    return differing / token_layers, with_one / tokens
