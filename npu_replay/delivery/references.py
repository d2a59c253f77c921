"""Reference: what a batch carries in the place of a sample's routes; and the seal of what it stands for."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from npu_replay.errors import InvalidRoutes
from npu_replay.routes.routed_experts import RoutedExperts

Read: TypeAlias = "Callable[[Sequence[Any], float], list[RoutedExperts | Exception]]"
"""Reads what lies behind handles, within so many seconds; in the place of what can't be had is why."""
_WORDS = 4096
_MASK = 2**63 - 1


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
        if not isinstance(piece, RoutedExperts):
            raise InvalidRoutes(
                "the routes of this sample can't be read",
                where=f"{self!r}, piece {number}",
                expected="routes that were put and not yet freed",
                got=f"{type(piece).__name__}: {piece}"[:300],
                cause="a step that is over, whose routes were freed; a worker or a node that died with them",
            )
        got = (len(piece), piece.fingerprint, piece.num_experts, piece.topk, piece.layers)
        wanted = (self.tokens, self.fingerprint, self.num_experts, self.topk, self.blocks[number])
        InvalidRoutes.unless(
            got == wanted,
            "these are the routes of another sample",
            f"(tokens, fingerprint, experts, top-k, layers) {wanted}",
            got,
            "a folder or an object that somebody else wrote to",
            f"{self!r}, piece {number}",
        )
        sealed = self.seals[number]
        InvalidRoutes.unless(
            sealed is None or seal(piece) == sealed,
            "these routes were changed on the way",
            f"the seal {sealed}",
            seal(piece) if sealed is not None else None,
            "memory or a file that somebody else wrote to",
            f"{self!r}, piece {number}",
        )
        return piece


def seal(routes: RoutedExperts) -> int:
    """63 bits that tell whether routes are the same bytes, at the speed of memory: sums of words, by place.

    It finds what goes wrong, not what is done on purpose.
    """
    flat = routes.ids.contiguous().numpy().reshape(-1).view(np.uint8)
    whole = len(flat) // 8 * 8
    words = flat[:whole].view(np.uint64)
    even = len(words) // _WORDS * _WORDS
    sums = [*words[:even].reshape(-1, _WORDS).sum(axis=1).tolist(), int(words[even:].sum()) & _MASK]
    sums += [int(flat[whole:].sum()), *_flags(routes.recorded)]
    total = 0
    for one in sums:
        total = (total * 0x9E3779B97F4A7C15 + one) & _MASK
    return total


def _flags(recorded: torch.Tensor) -> tuple[int, int]:
    """How many rows have a route, and where those without lie."""
    missing = (~recorded).nonzero()[:, 0]
    return len(recorded) - len(missing), int(missing.sum())
