"""Routes found by their tokens: what a run holds at a time, bounded by bytes."""

from __future__ import annotations

import logging

import torch

from npu_replay.errors import whole_number
from npu_replay.routes.routed_experts import RoutedExperts

logger = logging.getLogger(__name__)


class RoutesByTokens:
    """One RoutedExperts for each sequence, by the fingerprint of its tokens; the newest of each.

    Args:
        max_bytes: above it the sequences that came first are dropped.

    Attributes:
        bytes: held now.
        dropped: sequences that were dropped for the bound.
        replaced: sequences whose routes took the place of others, for the same tokens.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = whole_number(max_bytes, "max_bytes", least=1, most=2**63)
        self.bytes = self.dropped = self.replaced = 0
        self._held: dict[int, tuple[RoutedExperts, bool]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def get(self, mark: int) -> tuple[RoutedExperts | None, bool]:
        """The routes of the tokens with this fingerprint, and whether a rollout gave them."""
        return self._held.get(mark, (None, False))

    def put(self, mark: int, routes: RoutedExperts, *, rollout: bool) -> None:
        """Hold these; say so when others have to go for them."""
        before, _ = self._take_out(mark)
        if before is not None and not torch.equal(before.ids, routes.ids):
            self.replaced += 1
        if routes.ids.untyped_storage().nbytes() > routes.ids.nbytes:  # a part keeps the whole alive
            routes = routes.take(range(len(routes))).sequence(0, len(routes), mark)
        self._held[mark] = routes, rollout
        self.bytes += _size(routes)
        while self.bytes > self.max_bytes:
            if not self.dropped:
                logger.warning(
                    "[npu_replay] routes of %d sequences fill max_bytes=%d; the oldest are dropped from now "
                    "on, and an update with one of them is an error",
                    len(self),
                    self.max_bytes,
                )
            self._take_out(next(iter(self._held)))
            self.dropped += 1

    def clear(self) -> None:
        """Hold nothing any more; the counts stay."""
        self._held.clear()
        self.bytes = 0

    def _take_out(self, mark: int) -> tuple[RoutedExperts | None, bool]:
        found = self._held.pop(mark, (None, False))
        if found[0] is not None:
            self.bytes -= _size(found[0])
        return found


def _size(routes: RoutedExperts) -> int:
    return routes.ids.nbytes + routes.recorded.nbytes
