"""RoutesByTokens: holds routes by the fingerprint of their sample, bounded by bytes."""

from __future__ import annotations

import logging

import torch

from npu_replay.errors import InvalidRoutes, whole_number
from npu_replay.routes.routed_experts import RoutedExperts

logger = logging.getLogger(__name__)


class RoutesByTokens:
    """Holds the newest RoutedExperts of each sequence by its fingerprint, up to `max_bytes`.

    Between a rollout and its update, other routes of the same tokens are an error: they are another sample's.
    `dropped` counts sequences dropped for the bound, `replaced` those whose routes changed.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = whole_number(max_bytes, "max_bytes", least=1, most=2**63)
        self.bytes = self.dropped = self.replaced = 0
        self._held: dict[int, tuple[RoutedExperts, bool]] = {}
        self._waiting: set[int] = set()

    def __len__(self) -> int:
        return len(self._held)

    def get(self, mark: int, *, update: bool = False) -> tuple[RoutedExperts | None, bool]:
        """Return the routes of the sample with this fingerprint, and whether a rollout gave them."""
        if update:
            self._waiting.discard(mark)
        return self._held.get(mark, (None, False))

    def move(self, mark: int, to: int) -> None:
        """Give routes that a rollout put without a key to the first sample of their tokens that asks."""
        routes, rollout = self._held.get(mark, (None, False))
        if mark != to and routes is not None and rollout:
            self._take_out(mark)
            self.put(to, routes, rollout=True)

    def put(self, mark: int, routes: RoutedExperts, *, rollout: bool) -> None:
        """Hold these routes; warn the first time that the oldest are dropped for them."""
        before, _ = self.get(mark)
        differ = before is not None and not torch.equal(before.ids, routes.ids)
        if before is not None and differ and rollout and mark in self._waiting:
            problem = "two samples have the same tokens and other routes, and nothing tells them apart"
            expected = "sample_key=, in put() and in the model's call"
            newer = before.weight_version != routes.weight_version
            got = f"fingerprint {mark:#018x} twice before an update"
            cause = "the same question about other images, or one answer that was sampled twice"
            InvalidRoutes.unless(newer, problem, expected, got, cause)
        self._take_out(mark)
        self.replaced += differ
        if rollout:
            self._waiting.add(mark)
        if routes.ids.untyped_storage().nbytes() > routes.ids.nbytes:  # a view keeps its whole storage alive
            routes = routes.take(range(len(routes))).sequence(0, len(routes), mark)
        self._held[mark] = routes, rollout
        self.bytes += _size(routes)
        while self.bytes > self.max_bytes:
            if not self.dropped:
                logger.warning(
                    "[npu_replay] routes of %d sequences fill max_bytes=%d; the oldest are dropped from now "
                    "on, and an update with one of them is an error",
                    *(len(self), self.max_bytes),
                )
            self._take_out(next(iter(self._held)))
            self.dropped += 1

    def clear(self) -> None:
        """Drop all routes; the counts stay."""
        self._held.clear()
        self._waiting.clear()
        self.bytes = 0

    def _take_out(self, mark: int) -> None:
        self._waiting.discard(mark)
        found, _ = self._held.pop(mark, (None, False))
        self.bytes -= 0 if found is None else _size(found)


def _size(routes: RoutedExperts) -> int:
    return routes.ids.nbytes + routes.recorded.nbytes
