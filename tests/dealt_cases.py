"""A choice of all cases for each release: every pair of two axes, dealt out like cards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")

HAND = os.environ.get("NPU_REPLAY_MATRIX_CASES", "0")
"""The number of a hand, or `all` for every case; ci/matrix.sh says it."""


def dealt(
    first: Sequence[A], second: Sequence[B], third: Sequence[C], hand: str = HAND
) -> list[tuple[A, B, C]]:
    """A case for each value of the first and longest axis, the values of the others in turn.

    As many hands that follow each other as the second axis is long hold each pair of the two first axes once.
    The next as many have other triples than these, until all were there.

    Args:
        hand: any number from 0 on, or `all`: each with each with each.
    """
    if hand == "all":
        return [(a, b, c) for a in first for b in second for c in third]
    turn = int(hand) // len(second)
    return [
        (a, second[(i + int(hand)) % len(second)], third[(i + turn) % len(third)])
        for i, a in enumerate(first)
    ]
