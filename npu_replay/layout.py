"""TokenLayout: which token sits in which row of the router.

Routes ride the same road as the tokens: one index `row -> packed token or none`, and one gather.
«Packed» is the tokens of all sequences one after the other, without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch

from npu_replay.errors import MicroBatchError
from npu_replay.routed_experts import RoutedExperts


@dataclass(frozen=True, eq=False)
class TokenLayout:
    """For one micro-batch: the packed token in each row of the router.

    Attributes:
        rows: int64 [rows], the packed token, or -1 for padding.
        lengths: tokens of each sequence.
        fingerprints: of each sequence's tokens, if they are to be checked.
    """

    rows: torch.Tensor
    lengths: tuple[int, ...]
    fingerprints: tuple[int, ...] | None = None

    @classmethod
    def padded(
        cls,
        lengths: Sequence[int],
        length: int | None = None,
        *,
        side: Literal["right", "left"] = "right",
        order: Literal["sequence", "batch"] = "sequence",
        fingerprints: Sequence[int] | None = None,
    ) -> TokenLayout:
        """The layout of a padded batch [batch, length].

        Args:
            lengths: tokens of each sequence.
            length: what they are padded to; the longest when not given.
            side: where the padding is.
            order: "sequence" flattens sequence-major, as Megatron's routers see it (s*b); "batch"
                batch-major, as those of Hugging Face do (b*s).
            fingerprints: one for each sequence, held against those of the routes.
        """
        sizes = tuple(int(size) for size in lengths)
        if fingerprints is not None and len(fingerprints) != len(sizes):
            raise MicroBatchError(
                "another number of fingerprints than sequences", expected=len(sizes), got=len(fingerprints)
            )
        longest = max(sizes, default=0) if length is None else int(length)
        if any(size < 0 or size > longest for size in sizes):
            raise MicroBatchError(
                "a sequence is longer than what the batch is padded to", expected=f"<= {longest}", got=sizes
            )
        grid = torch.full((len(sizes), longest), -1, dtype=torch.int64)
        first = 0
        for row, size in enumerate(sizes):
            start = 0 if side == "right" else longest - size
            grid[row, start : start + size] = torch.arange(first, first + size)
            first += size
        rows = (grid.T if order == "sequence" else grid).reshape(-1)
        return cls(rows, sizes, None if fingerprints is None else tuple(fingerprints))

    def gather(self, batch: Sequence[RoutedExperts]) -> RoutedExperts:
        """The routes in the router's rows, from one RoutedExperts a sequence.

        A sequence may have one row fewer than tokens: the last token is never fed to the rollout engine,
        so it has no route. Padding has none either.

        Raises:
            MicroBatchError: another number of sequences or of tokens, or another sequence's routes.
        """
        if len(batch) != len(self.lengths):
            raise MicroBatchError(
                "another number of sequences than the layout has", expected=len(self.lengths), got=len(batch)
            )
        packed = RoutedExperts.concat([self._whole(number, routes) for number, routes in enumerate(batch)])
        return packed.take(self.rows)

    def scatter(self, routes: RoutedExperts) -> list[RoutedExperts]:
        """One RoutedExperts a sequence, from the router's rows; the inverse of `gather`."""
        if len(routes) != len(self.rows):
            raise MicroBatchError(
                "the routes have another number of rows than the layout",
                expected=len(self.rows),
                got=len(routes),
                cause="a layout made for other lengths, or another padding",
            )
        row_of = torch.full((sum(self.lengths),), -1, dtype=torch.int64)
        filled = self.rows >= 0
        row_of[self.rows[filled]] = filled.nonzero()[:, 0]
        return [routes.take(row_of[a:b]) for a, b in self._spans()]

    def _spans(self) -> list[tuple[int, int]]:
        ends = torch.tensor((0, *self.lengths)).cumsum(0).tolist()
        return list(pairwise(ends))

    def _whole(self, number: int, routes: RoutedExperts) -> RoutedExperts:
        """The routes of one sequence, with a row for its last token."""
        size = self.lengths[number]
        if not isinstance(routes, RoutedExperts):
            raise MicroBatchError(
                "this isn't RoutedExperts",
                where=f"sequence {number}",
                expected="RoutedExperts",
                got=type(routes),
            )
        if len(routes) not in (size, size - 1):
            raise MicroBatchError(
                "the routes have another number of tokens than the sequence",
                where=f"sequence {number}",
                expected=f"{size} (or {size - 1}: the last token has no route)",
                got=len(routes),
                cause="a response that was cut after the rollout, or routes of another sequence",
            )
        if self.fingerprints is not None and routes.fingerprint not in (None, self.fingerprints[number]):
            raise MicroBatchError(
                "the routes belong to other tokens",
                where=f"sequence {number}",
                expected=f"fingerprint {self.fingerprints[number]:#018x}",
                got=f"{routes.fingerprint:#018x}",
                cause="retokenised text, a shuffled batch, or parts merged in another order",
            )
        at = torch.arange(size)
        at[len(routes) :] = -1
        return routes.take(at)
