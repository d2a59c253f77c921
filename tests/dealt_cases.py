"""A choice of all cases for each release: every pair of two axes, dealt out like cards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")

HANDS = 8
HAND = os.environ.get("NPU_REPLAY_MATRIX_CASES", "0")
"""The number of a hand, or `all` for every case; ci/matrix.sh says it."""


def every(first: Sequence[A], second: Sequence[B], third: Sequence[C]) -> list[tuple[A, B, C]]:
    """Each with each with each."""
    return [(a, b, c) for a in first for b in second for c in third]


def dealt(first: Sequence[A], second: Sequence[B], third: Sequence[C], hand: int) -> list[tuple[A, B, C]]:
    """A share of the pairs of the two first axes, each with one value of the third, which takes turns.

    HANDS hands that follow each other hold each pair of the two first axes once, each hand every value of
    all three. The next HANDS hands have other triples than these, until all were there.

    Args:
        hand: any number from 0 on.
    """
    turn, hand = divmod(hand, HANDS)
    return [
        (a, b, third[(i + i // HANDS + j // HANDS + turn) % len(third)])
        for i, a in enumerate(first)
        for j, b in enumerate(second)
        if (i + j) % HANDS == hand
    ]
