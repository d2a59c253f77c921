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
    return {
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
        "router_mismatch": mismatch(batches, old.shown),
        "update_mismatch": mismatch(batches, [update.shown for update in updates]),
    }


def mismatch(batches: Sequence[Batch], shown: Sequence[RoutedExperts]) -> float:
    """The share of token-layers at which this trainer's routers showed other experts than the engine used."""
    found = [npu_replay.compare(batch.routes, one) for batch, one in zip(batches, shown, strict=True)]
    counts = together([[sum(one.differing for one in found), sum(one.token_layers for one in found)]]).sum(
        dim=0
    )
    return float(counts[0] / counts[1])
