"""Undo the mask that a router lays over its scores right before its top-k.

A replayed expert may lie in a group that the router masks now. It then needs its own score, not the number
that the mask has put there. Megatron-core, MindSpeed-LLM and the group-limited families of transformers mask
by `masked_fill` on the scores of the top-k, so that one function is noted. Other masks aren't undone: where
one gives a replayed expert a weight of 0 or -inf, `effect.py` refuses the router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from npu_replay.sessions.torch_state import address, outside_modes


class Fill(NamedTuple):
    """Holds one `masked_fill` of scores [rows, experts]: the scores before and after it, and its mask."""

    before: torch.Tensor
    after: torch.Tensor
    mask: torch.Tensor


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
    before, mask = before_fills(scores, fills)
    if mask is None:
        return scores.gather(1, ids)
    unfilled = before.gather(1, ids)
    if leaves >= topk and len(fills) == 1:
        return unfilled
    return torch.where(_keeps_fill(mask, scores, topk), scores.gather(1, ids), unfilled)


def unfilled(scores: torch.Tensor, fills: Sequence[Fill], topk: int) -> torch.Tensor:
    """Return the scores of all experts as `unmasked` does, [rows, experts]."""
    before, mask = before_fills(scores, fills)
    return scores if mask is None else torch.where(_keeps_fill(mask, scores, topk), scores, before)


def _keeps_fill(mask: torch.Tensor, scores: torch.Tensor, topk: int) -> torch.Tensor:
    with outside_modes():
        return mask.expand(scores.shape).sum(dim=1, keepdim=True) > scores.shape[1] - topk


def before_fills(scores: torch.Tensor, fills: Sequence[Fill]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the scores before the fills that lead to `scores` without a step in between, and their masks."""
    before = scores
    mask = None
    for fill in reversed(fills):
        if fill.after is before or address(fill.after) == address(before):
            before = fill.before
            mask = fill.mask if mask is None else mask | fill.mask
    return before, mask


_MOVES = frozenset(
    {"masked_fill", "where", "setitem", "index_put", "index_fill", "scatter", "minimum", "copy", "cat"}
) | {"clone", "contiguous", "to", "type", "float", "double", "half", "bfloat16"}
"""Functions that only place scores and numbers; all others compute."""


class _Step(NamedTuple):
    """Describes a function that made scores [rows, experts], and the scores that it was given."""

    name: str
    made: torch.Tensor
    sources: list[torch.Tensor]


class Steps:
    """Keeps the functions that make scores [rows, experts] in one call of a router."""

    def __init__(self, rows: int, num_experts: int) -> None:
        self._shape = (rows, num_experts)
        self._steps: list[_Step] = []

    def run(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a function of torch, and keep it if it makes scores or writes into them."""
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or name.startswith("__i") or name[-1:] == "_" != name[-2:-1]
        with outside_modes():
            tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            sources = [tensor.detach() for tensor in tensors if self._is_scores(tensor)]
            if writes and sources:
                sources[0] = sources[0].clone()
        result = func(*args, **kwargs)
        made = args[0] if writes and args else result
        with outside_modes():
            if isinstance(made, torch.Tensor) and self._is_scores(made):
                self._steps.append(_Step(name.strip("_"), made.detach(), sources))
        return result

    def ruled_out(
        self, scores: torch.Tensor, fills: Sequence[Fill], ids: torch.Tensor, own: torch.Tensor
    ) -> torch.Tensor:
        """Return bool [rows, topk]: which of these ids have a score that was made from a mask's number.

        A row whose own choice `own` has such a score, too, has no other experts to choose.
        """
        before = before_fills(scores.detach(), fills)[0].detach()
        made = [step for step in self._steps if address(step.made) == address(before)]
        masked = _masked(made[-1], before, own) if made else before == 0
        lineage = self._lineage(before)
        for fill in fills:
            if address(fill.after) in lineage:  # its result went through another function
                masked = masked | fill.mask
        return masked.gather(1, ids) & ~masked.gather(1, own).any(dim=1, keepdim=True)

    def _lineage(self, scores: torch.Tensor) -> set[int]:
        """Return the addresses of the scores that these were made of, and of these."""
        found = {address(scores)}
        for step in reversed(self._steps):
            if address(step.made) in found:
                found.update(map(address, step.sources))
        return found

    def _is_scores(self, tensor: torch.Tensor) -> bool:
        return tensor.shape == self._shape and tensor.is_floating_point()


def _masked(step: _Step, made: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return bool [rows, experts]: which scores the last step may have masked.

    A mask leaves the scores of the router's own choice, and puts the others below them. A step that computes
    also lowers by more than the range of the scores (-1e4), or multiplies by 0, unlike an expert bias.
    """
    chosen = made.gather(1, own)
    below = made < chosen.amin(dim=1, keepdim=True)
    lowest = 2 * chosen.abs().amax(dim=1, keepdim=True)
    places = step.name in _MOVES
    masked = torch.zeros_like(below)
    kept = torch.zeros_like(below[:, :1])
    for source in (source.to(made.dtype) for source in step.sources):
        keeps_own = (source.gather(1, own) == chosen).all(dim=1, keepdim=True)
        may_mask = (source != made) & below & keeps_own
        if not places:
            may_mask = may_mask & ((source - made > lowest) | (made == 0))
        masked = masked | may_mask
        kept = kept | keeps_own
    # Numbers that were placed into something else than the scores: nothing tells them but zeros.
    return masked | ((made == 0) & ~kept.any()) if places else masked
