"""Reference: what a batch carries in the place of a sample's routes; and the seal of what it stands for."""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from npu_replay.errors import InvalidRoutes
from npu_replay.routes.routed_experts import RoutedExperts

Read: TypeAlias = "Callable[[Sequence[Any], float], list[RoutedExperts | Exception]]"
"""Reads what lies behind handles, within so many seconds; in the place of what can't be had is why."""
_BLOCK = 1 << 13
_AT_ONCE = 1 << 20
"""Bytes that stay in the processor's cache until both sums have read them."""


class Reference:
    """One sample's routes, put away. It may be pickled, copied, moved and repeated; it holds no ids.

    No dataclass: a batch's container may be pydantic's, which makes dicts of those.

    Attributes:
        key: tells samples apart, 63 bits; a sample that is put twice has two.
        step: of the job, for whoever keeps what he fetched; as the caller of `put` says.
        tokens: rows of the routes.
        fingerprint: of the tokens, if the routes know it.
        num_experts, topk: of the model.
        blocks: the decoder layers of each piece, ascending.
        seals: of each piece, held against what is read; None where the carrier has its own digest.
        handles: what each piece is read by.
        read: reads handles: a function of the carrier's module.
        release: gives handles free, likewise; None where nobody has to.
    """

    def __init__(
        self,
        sample: RoutedExperts,
        *,
        blocks: Sequence[tuple[int, ...]],
        seals: Sequence[int | None],
        handles: Sequence[Any],
        read: Read,
        release: Callable[[Sequence[Any]], None] | None,
        step: int = 0,
    ) -> None:
        self.key, self.step = secrets.randbits(63) or 1, step
        self.tokens, self.fingerprint = len(sample), sample.fingerprint
        self.num_experts, self.topk = sample.num_experts, sample.topk
        self.blocks, self.seals, self.handles = tuple(blocks), tuple(seals), tuple(handles)
        self.read, self.release = read, release

    @property
    def layers(self) -> tuple[int, ...]:
        """The decoder layers of all pieces."""
        return tuple(layer for block in self.blocks for layer in block)

    def __repr__(self) -> str:
        shape = f"{self.tokens} tokens, {len(self.layers)} layers in {len(self.blocks)} pieces"
        return f"Reference({self.key:016x}, {shape}, top-{self.topk} of {self.num_experts})"

    def check(self, number: int, piece: object) -> RoutedExperts:
        """What was read of one piece, if it is what was put.

        Raises:
            InvalidRoutes: it couldn't be read, or is something else.
        """
        where = "{!r}, piece {}".format  # most pieces are right, and need no words
        if not isinstance(piece, RoutedExperts):
            raise InvalidRoutes(
                "the routes of this sample can't be read",
                where=where(self, number),
                expected="routes that were put and not yet freed",
                got=f"{type(piece).__name__}: {piece}"[:300],
                cause="a step that is over, whose routes were freed; a worker or a node that died with them",
            )
        got = (len(piece), piece.fingerprint, piece.num_experts, piece.topk, piece.layers)
        wanted = (self.tokens, self.fingerprint, self.num_experts, self.topk, self.blocks[number])
        if got != wanted:
            raise InvalidRoutes(
                "these are the routes of another sample",
                where=where(self, number),
                expected=f"(tokens, fingerprint, experts, top-k, layers) {wanted}",
                got=got,
                cause="a folder or an object that somebody else wrote to",
            )
        sealed = self.seals[number]
        if sealed is not None and (found := seal(piece)) != sealed:
            raise InvalidRoutes(
                "these routes were changed on the way",
                where=where(self, number),
                expected=f"the seal {sealed}",
                got=found,
                cause="memory or a file that somebody else wrote to",
            )
        return piece


def seal(routes: RoutedExperts) -> int:
    """64 bits that tell whether routes are the same bytes in the same places, at the speed of memory.

    Bytes lie in blocks of 1,024 words. Words that change places change the sum of their blocks, or that of
    their places in all blocks. It finds what goes wrong, not what is done on purpose.
    """
    data = routes.ids.contiguous().numpy().reshape(-1).view(np.uint8)
    whole = len(data) // _BLOCK * _BLOCK
    found = zlib.crc32(routes.recorded.contiguous().numpy().data, zlib.crc32(data[whole:].data))
    places = np.zeros(_BLOCK // 8, np.uint64)
    for first in range(0, whole, _AT_ONCE):
        words = data[first : min(first + _AT_ONCE, whole)].view(np.uint64).reshape(-1, len(places))
        found = zlib.crc32(np.add.reduce(words, axis=1).data, found)
        places += np.add.reduce(words, axis=0)
    return zlib.crc32(places.data) << 32 | found
