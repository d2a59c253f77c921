"""Keeps R2's routes on the ranks that record them, so that batches have no ids.

A batch carries a key a token, which all ranks of a replica compute alike. Each keeps the rows of whole
samples in its own layers. A sample that another replica trains on moves once, before its first update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from npu_replay.compat.verl.batch_routes import RoutesByKey
from npu_replay.parallel.collect import exchange
from npu_replay.routes.routed_experts import RoutedExperts

_STEPS = 2
"""The number of steps that routes are kept: a trainer may record a step before it trains on the last one."""
_PASSES = 8
"""The number of passes taken for one step if none was trained on, as while only a critic is trained.
verl's trainers record a step in one.
"""


class R2Store:
    """Keeps what the passes of one engine record, and gives each sample its key."""

    def __init__(self, held: RoutesByKey) -> None:
        self._held = held
        self._step = self._passes = 0
        self._trained = False
        self._place = ""
        self._seen: Counter[int] = Counter()

    def begin(self, salt: int, replica: int) -> None:
        """Begin a pass that records; drops what is older than the step before.

        The salt is a random number of the pass, equal on all ranks, so that no other pass has its keys, also
        one of restarted workers. The replica is the data-parallel rank.
        """
        if self._trained or self._passes == _PASSES:
            self._step, self._passes, self._trained = self._step + 1, 0, False
            self._held.drop_before(self._step - _STEPS + 1)
        self._passes += 1
        self._place = f"{salt} {replica}"
        self._seen.clear()

    def trained(self) -> None:
        """Note that a pass trains: the next one that records begins a step."""
        self._trained = True

    def keep(self, chunk: int, samples: int, routes: Sequence[RoutedExperts]) -> list[int]:
        """Keep the routes of a chunk's next micro-batch, none if its layers are dense; return the keys."""
        place = f"{self._place} {self._seen[chunk]}"
        self._seen[chunk] += 1
        digests = (blake2b(f"{place} {number}".encode(), digest_size=8) for number in range(samples))
        keys = [int.from_bytes(one.digest(), "little") for one in digests]
        for key, one in zip(keys, routes, strict=False):
            self._held.add_layers(key, one, self._step)
        return keys

    def fetch(self, lacking: Sequence[int], group: Any) -> None:
        """Fetch what another data-parallel rank recorded. Every rank of the group has to call it."""
        for key, routes in exchange(self._held.usable, lacking, group).items():
            self._held.keep(key, routes, self._step)
