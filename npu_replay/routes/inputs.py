"""What a model is called with, held against the tokens that its routes belong to.

Two micro-batches of one shape that have changed places look alike to a router, and so do rows that are
padded on the other side. Their token ids don't.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from npu_replay.routes.fingerprint import fingerprint

_NAMES = ("input_ids", "tokens")


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tokens that routes belong to, as a model is called with them.

    Attributes:
        fed: int64 [tokens fed], the packed token in each place, or -1 for padding; None where they are one
            sequence, in the order of memory (of a record).
        lengths: tokens of each sequence.
        marks: the fingerprint of each sequence; None for one that isn't checked.
    """

    fed: torch.Tensor | None
    lengths: tuple[int, ...]
    marks: Sequence[int | None]

    @classmethod
    def recorded(cls, tokens: torch.Tensor) -> Inputs:
        """Those of a forward that was recorded."""
        return cls(None, (tokens.numel(),), (fingerprint(tokens.flatten()),))

    def fit(self, tokens: torch.Tensor) -> bool:
        """Are these they? `tokens` is int64, as it was passed, on the CPU. A sequence that is fed in part
        isn't looked at."""
        if self.fed is None:
            return fingerprint(tokens.flatten()) == self.marks[0]
        if tokens.numel() != len(self.fed):
            return True  # no token ids of this batch; rows that don't fit are found by the routers
        there = self.fed >= 0
        packed = torch.zeros(sum(self.lengths), dtype=torch.int64)
        packed[self.fed[there]] = tokens.flatten()[there]
        here = torch.zeros(len(packed), dtype=torch.bool).index_fill(0, self.fed[there], True)
        spans = pairwise(accumulate(self.lengths, initial=0))
        return all(
            mark is None or not here[first:end].all() or fingerprint(packed[first:end]) == mark
            for (first, end), mark in zip(spans, self.marks, strict=True)
        )


def copied(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """A copy of the token ids that a model is called with, where they are; None if it gets none.

    They are the argument named input_ids or tokens, or the first one if it is [batch, sequence]. What an
    attention_mask of that shape leaves out counts as 0: padding ids may differ from pass to pass.
    """
    named = (kwargs[name] for name in _NAMES if isinstance(kwargs.get(name), torch.Tensor))
    found = next(named, args[0] if args and isinstance(args[0], torch.Tensor) and args[0].dim() > 1 else None)
    if found is None or found.dtype not in (torch.int64, torch.int32) or type(found) is not torch.Tensor:
        return None
    if found.is_nested or found.dim() == 0:
        return None
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == found.shape:
        return found.detach() * (mask != 0)
    return found.detach().clone()  # loaders and captured graphs write the next batch into the same memory
