"""compare: the figures of the demo and of every report, against sums done by hand."""

from __future__ import annotations

import math

import pytest
import torch

import npu_replay
from npu_replay import ReplayError, RoutedExperts


def routes(ids: list[list[list[int]]], layers: tuple[int, ...] = (0, 1), **about: object) -> RoutedExperts:
    return RoutedExperts(ids=torch.tensor(ids), layers=layers, num_experts=8, **about)


A = [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 2], [1, 3]], [[5, 6], [0, 7]]]


def test_the_order_of_experts_does_not_count_but_the_set_does() -> None:
    b = [[[1, 0], [3, 2]], [[4, 6], [6, 7]], [[2, 0], [1, 4]], [[5, 7], [0, 6]]]
    mismatch = npu_replay.compare(routes(A), routes(b))
    assert (mismatch.differing, mismatch.token_layers) == (4, 8)
    assert (mismatch.router_mismatch, mismatch.token_mismatch) == (0.5, 0.75)
    assert mismatch.layer_mismatch == {0: 0.5, 1: 0.5}
    lost = routes(A[2:]).with_known(shown=torch.full((2, 2, 2), -1, dtype=torch.int16))
    assert npu_replay.compare([routes(A[:2]), lost], routes(A)).differing == 4, "seen in one alone"


def test_only_rows_recorded_on_both_sides_and_common_layers_count() -> None:
    b = [[[7, 6]], [[4, 5]], [[7, 6]], [[5, 6]]]
    ours = routes(A, recorded=torch.tensor([False, True, True, True]))
    theirs = routes(b, layers=(0,), recorded=torch.tensor([True, True, True, False]))
    mismatch = npu_replay.compare([ours.take([0, 1]), ours.take([2, 3])], theirs)
    assert (mismatch.differing, mismatch.token_layers, mismatch.layer_mismatch) == (1, 2, {0: 0.5})
    assert (mismatch.router_mismatch, mismatch.token_mismatch) == (0.5, 0.5)


def test_log_probs_give_kl_ratio_and_the_largest_difference() -> None:
    a = torch.tensor([-1.0, -2.0, -3.0, -9.0])
    b = torch.tensor([-1.5, -2.0, -2.0, 0.0])
    difference = npu_replay.compare(a, b, torch.tensor([True, True, True, False]))
    logs = [-0.5, 0.0, 1.0]
    assert (difference.tokens, difference.kl) == (
        3,
        pytest.approx(sum(math.exp(x) - 1 - x for x in logs) / 3),
    )
    assert (difference.max_difference, difference.mean_difference) == pytest.approx((1, 0.5))
    ratios = [math.exp(x) for x in logs]
    assert (difference.ratio_min, difference.ratio_mean, difference.ratio_max) == pytest.approx(
        (min(ratios), sum(ratios) / 3, max(ratios))
    )
    same = npu_replay.compare(a, a)
    assert (same.kl, same.ratio_min, same.ratio_max) == (0, 1, 1)


def test_what_cannot_be_compared_is_refused() -> None:
    a = torch.zeros(3)
    for wrong, words in (
        ((a, torch.zeros(4)), "different shapes"),
        ((a, a, torch.ones(4).bool()), "different shapes"),
        ((a, a, torch.zeros(3).bool()), "no token"),
        ((a, torch.full((3,), -math.inf)), "aren't finite"),
        ((routes(A), routes(A[:2])), "differ in tokens.*Expected 4, got 2"),
        ((routes(A), routes(A, layers=(5, 6))), "nothing in common"),
    ):
        with pytest.raises(ReplayError, match=words):
            npu_replay.compare(*wrong)
    with pytest.raises(ReplayError, match="a mask goes with log-probs"):
        npu_replay.compare(routes(A), routes(A), torch.ones(4))
