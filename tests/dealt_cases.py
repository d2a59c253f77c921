"""A choice of all cases for each release: every pair of two axes, dealt out like cards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

SHARES = 8
"""So many hands that follow each other hold each value of the first axis once, where it has so many."""


def asked() -> str:
    """Return the number of this process's hand, or `all` for every case; ci/matrix.sh says it.

    It is read when it is asked for: a child of ci/matrix_run.py imports this file before it has a hand.
    """
    return os.environ.get("NPU_REPLAY_MATRIX_CASES", "0")


def dealt(
    first: Sequence[Any], second: Sequence[Any], third: Sequence[Any], hand: str = ""
) -> list[tuple[Any, Any, Any]]:
    """A case for every eighth value of the first and longest axis, the values of the others in turn.

    `SHARES` times as many hands that follow each other as the second axis is long hold each pair of the two
    first axes once. The next as many have other triples than these. An axis of fewer than `SHARES` values
    gives each hand one of them.

    Args:
        hand: any number from 0 on, or `all`: each with each with each; empty for this process's.
    """
    hand = hand or asked()
    if hand == "all":
        return [(a, b, c) for a in first for b in second for c in third]
    number = int(hand)
    shares = min(SHARES, len(first))
    turn = number // shares
    # One more, so that a hand of one case has another order than the plainest, which comes first.
    other = 1 + turn + turn // len(second)
    return [
        (first[i], second[(i + turn) % len(second)], third[(i // shares + other) % len(third)])
        for i in range(number % shares, len(first), shares)
    ]


def import_orders(hand: str = "") -> list[str]:
    """Return whether npu_replay comes before or after Megatron where its changes are reported.

    Each release has it "last", and a third of the hands "first" too, as it comes in all other tests.
    """
    hand = hand or asked()
    return ["first", "last"] if hand == "all" or int(hand) % 3 == 0 else ["last"]
