"""A store of a run's routes never gives a sample those of another one with the same tokens."""

from __future__ import annotations

import pytest
import torch

from npu_replay import InvalidRoutes, RoutedExperts
from npu_replay.routes.store import RoutesByTokens


def routes(seed: int, version: int | None = None) -> RoutedExperts:
    ids = torch.rand(5, 2, 8, generator=torch.Generator().manual_seed(seed)).topk(2).indices
    return RoutedExperts(ids=ids, layers=[0, 1], num_experts=8, weight_version=version)


def test_other_rollouts_of_the_same_fingerprint_are_an_error_until_an_update_took_the_first() -> None:
    store = RoutesByTokens(1 << 20)
    store.put(7, routes(1), rollout=True)
    store.put(7, routes(1), rollout=True)
    with pytest.raises(InvalidRoutes, match="two samples have the same tokens"):
        store.put(7, routes(2), rollout=True)
    assert store.get(7) == (routes(1), True), "what was there stays"
    assert (store.bytes, len(store)) == (routes(1).ids.nbytes + 5, 1)
    with pytest.raises(InvalidRoutes, match="two samples have the same tokens"):
        store.put(7, routes(2), rollout=True)
    store.get(7, update=True)
    store.put(7, routes(2), rollout=True)
    assert store.get(7) == (routes(2), True)


def test_newer_weights_and_newer_records_take_the_place_of_older_ones() -> None:
    store = RoutesByTokens(1 << 20)
    store.put(7, routes(1, version=1), rollout=True)
    store.put(7, routes(2, version=2), rollout=True)
    store.put(8, routes(1), rollout=False)
    store.put(8, routes(2), rollout=False)
    assert store.get(7) == (routes(2, version=2), True)
    assert store.replaced == 2


def test_what_was_dropped_or_cleared_is_waited_for_no_longer() -> None:
    store = RoutesByTokens(routes(1).ids.nbytes + 5)
    store.put(7, routes(1), rollout=True)
    store.put(8, routes(2), rollout=True)
    store.put(7, routes(3), rollout=True)
    store.clear()
    store.put(7, routes(4), rollout=True)
    assert store.get(7) == (routes(4), True)


def test_routes_without_a_key_move_to_the_first_sample_that_asks() -> None:
    store = RoutesByTokens(1 << 20)
    store.put(7, routes(1), rollout=True)
    store.put(8, routes(2), rollout=False)
    for mark, to in ((7, 7), (7, 71), (7, 72), (8, 81), (9, 91)):
        store.move(mark, to)
    assert store.get(71) == (routes(1), True)
    assert [store.get(mark)[0] for mark in (7, 72, 81, 91)] == [None] * 4
    assert store.get(8) == (routes(2), False), "a record has its own key"
