"""Undo the mask that a router lays over its scores right before its top-k.

A replayed expert may lie in a group that the router masks now. It then needs its own score, not the number
that the mask has put there. Megatron-core, MindSpeed-LLM and the group-limited families of transformers mask
by `masked_fill` on the scores of the top-k, so that one function is noted. Other masks aren't undone, nor is
one whose scores are changed in place afterwards: where such a mask gives a replayed expert a weight of 0 or
-inf, `effect.py` refuses the router.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from npu_replay.seam.torch_state import address, outside_modes


class Fill(NamedTuple):
    """Holds one `masked_fill` of scores [rows, experts]: the scores before and after it, and its mask.

    `versions` are those of `before` and `after`, which tell whether these have been changed since; None in
    inference mode.
    """

    before: torch.Tensor
    after: torch.Tensor
    mask: torch.Tensor
    versions: tuple[int, int] | None

    @classmethod
    def of(cls, before: torch.Tensor, after: torch.Tensor, mask: torch.Tensor) -> Fill:
        is_told = not (before.is_inference() or after.is_inference())
        return cls(before, after, mask, (before._version, after._version) if is_told else None)


def unmasked(
    scores: torch.Tensor, fills: Sequence[Fill], topk: int, ids: torch.Tensor, leaves: int = 0
) -> torch.Tensor:
    """Return the scores of these ids as they were before the fills that made them, [rows, topk].

    A row in which fewer than `topk` experts are unmasked keeps its fill: the router itself chooses masked
    experts there, as in a row of padding.

    Args:
        scores: the argument of the top-k, [rows, experts].
        ids: int64 [rows, topk].
        leaves: the number of experts that the router's own fill leaves in each row; 0: not known.
    """
    enough = _leaves_enough(fills, topk, leaves)
    if enough and fills[0].after is scores and _is_unchanged(fills[0]):
        return fills[0].before.gather(1, ids)
    before, mask = before_fills(scores, fills)
    if mask is None:
        return scores.gather(1, ids)
    unfilled = before.gather(1, ids)
    if enough:
        return unfilled
    return torch.where(_keeps_fill(mask, scores, topk), scores.gather(1, ids), unfilled)


def unfilled(scores: torch.Tensor, fills: Sequence[Fill], topk: int, leaves: int = 0) -> torch.Tensor:
    """Return the scores of all experts as `unmasked` does, [rows, experts]."""
    before, mask = before_fills(scores, fills)
    if mask is None or _leaves_enough(fills, topk, leaves):
        return before
    return torch.where(_keeps_fill(mask, scores, topk), scores, before)


def _is_unchanged(fill: Fill) -> bool:
    """Return whether the scores before and after a fill are what they were when it was noted."""
    return fill.versions is None or fill.versions == (fill.before._version, fill.after._version)


def _leaves_enough(fills: Sequence[Fill], topk: int, leaves: int) -> bool:
    """Return whether the router's own fill leaves each row its top-k, so that no row keeps its fill."""
    return leaves >= topk and len(fills) == 1


def _keeps_fill(mask: torch.Tensor, scores: torch.Tensor, topk: int) -> torch.Tensor:
    with outside_modes():
        return mask.expand(scores.shape).sum(dim=1, keepdim=True) > scores.shape[1] - topk


def before_fills(scores: torch.Tensor, fills: Sequence[Fill]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the scores before the fills that lead to `scores` without a step in between, and their masks."""
    before = scores
    mask = None
    for fill in reversed(fills):
        leads_there = fill.after is before or address(fill.after) == address(before)
        if leads_there and _is_unchanged(fill):
            before = fill.before
            mask = fill.mask if mask is None else mask | fill.mask
    return before, mask


_LOWEST = -9999.0
"""A score below this is a mask's number: -inf, the least of its dtype, -1e9 or -1e4."""


def ruled_out(
    scores: torch.Tensor, fills: Sequence[Fill], ids: torch.Tensor, own: torch.Tensor
) -> torch.Tensor:
    """Return bool [rows, topk]: which of these ids have 0 or a mask's number for a score.

    A row whose own choice `own` has such a score, too, has no other experts to choose.
    """
    before, _ = before_fills(scores.detach(), fills)
    masked = (before == 0) | (before < _LOWEST)
    return masked.gather(1, ids) & ~masked.gather(1, own).any(dim=1, keepdim=True)
