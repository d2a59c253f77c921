"""R2 without its ids in batches: what a pass over the old log-probs records stays in the ranks that do.

A batch carries a key a token (`delivery`), which all ranks of a replica work out alike. Each keeps the rows
of whole samples in its own layers. So nothing is gathered over pipeline stages, and the driver moves no ids.
A sample that another replica trains on moves once, before the first update that wants it.

Switched on by NPU_REPLAY_DELIVERY on every rank. Probes nothing. Offers: `Keeper` to a pass that records,
`recorded` to one that replays. It changes nothing by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any

from npu_replay.parallel.exchange import exchange
from npu_replay.parallel.merge import side_by_side
from npu_replay.routes.routed_experts import RoutedExperts

_STEPS = 2
"""For so many steps routes are kept: a trainer may record a step's before it trains on the last one's."""
_PASSES = 8
"""So many passes are taken for a step where none of them was trained on, as while a critic alone is trained;
a trainer of verl records a step in one."""


class Recorded:
    """What this rank recorded, or was sent, by the keys of its samples: of its own layers."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, RoutedExperts]] = {}
        self._step = self._passes = 0
        self._trained = False

    def __len__(self) -> int:
        return len(self._held)

    def clear(self) -> None:
        """Forget all."""
        self._held.clear()

    def new_pass(self) -> None:
        """A pass records; what is older than the step before goes."""
        if self._trained or self._passes == _PASSES:
            self._step, self._passes, self._trained = self._step + 1, 0, False
            oldest = self._step - _STEPS + 1
            self._held = {key: one for key, one in self._held.items() if one[0] >= oldest}
        self._passes += 1

    def trained(self) -> None:
        """A pass trains: the next one that records begins a step."""
        self._trained = True

    def keep(self, key: int, routes: RoutedExperts) -> None:
        """Keep a sample's routes, beside those of other chunks of this rank."""
        if key in self._held:
            routes = side_by_side([self._held[key][1], routes])
        self._held[key] = self._step, routes

    def lacking(self, keys: Iterable[int]) -> list[int]:
        """Which of the samples that are to be replayed aren't here."""
        return sorted(set(keys) - self._held.keys())

    def fetch(self, lacking: Sequence[int], group: Any) -> None:
        """Have what another data-parallel rank recorded. Every rank of the group has to call it.

        Raises:
            ReplayError: ranks are gone.
        """
        held = {key: routes for key, (_, routes) in self._held.items()}
        for key, routes in exchange(held, lacking, group).items():
            self._held[key] = self._step, routes

    def of(self, key: int) -> RoutedExperts | None:
        """A sample's routes; None if they aren't here."""
        return self._held[key][1] if key in self._held else None

    @property
    def nbytes(self) -> int:
        """Of the ids that are held."""
        return sum(routes.ids.nbytes for _, routes in self._held.values())


recorded = Recorded()


class Keeper:
    """Keeps what one pass records, and gives each sample its key.

    Args:
        salt: a random number of the pass, the same on all ranks: no other pass has its keys, one of workers
            that are started anew neither.
        replica: the data-parallel rank.
    """

    def __init__(self, salt: int, replica: int) -> None:
        recorded.new_pass()
        self._place = f"{salt} {replica}"
        self._seen: Counter[int] = Counter()

    def keep(self, chunk: int, samples: int, routes: Sequence[RoutedExperts]) -> list[int]:
        """The keys of a micro-batch's samples. A chunk's micro-batches come in their order.

        Args:
            routes: of each sample, in the chunk's layers; none where these are dense.
        """
        place = f"{self._place} {self._seen[chunk]}"
        self._seen[chunk] += 1
        keys = [_key(f"{place} {number}") for number in range(samples)]
        for key, one in zip(keys, routes, strict=False):
            recorded.keep(key, one)
        return keys


def _key(place: str) -> int:
    return int.from_bytes(blake2b(place.encode(), digest_size=8).digest(), "little")
