"""The store of an engine's routes by key, and what R2 puts there, without verl."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from npu_replay import InvalidRoutes, RoutedExperts, RoutedModel, delivery
from npu_replay.compat.verl import batch_routes
from npu_replay.compat.verl.batch_routes import R2Store, RoutesByKey
from npu_replay.compat.verl.r3_store import Putter
from npu_replay.compat.verl.tensors import GivenRoutes
from piece_files import FileCarrier

MODEL = RoutedModel(layers=(1, 3), num_layers=4, num_experts=8, topk=2)
TOKENS = 6


def routes(layer: int = 1) -> RoutedExperts:
    ids = torch.rand(TOKENS, 1, 8, generator=torch.Generator().manual_seed(layer)).topk(2).indices
    return RoutedExperts(ids=ids, layers=(layer,), num_experts=8)


def filled() -> tuple[RoutesByKey, R2Store]:
    held = RoutesByKey()
    held.has((1, 3))
    return held, R2Store(held)


def test_routes_are_held_for_their_step_and_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    held, store = filled()
    keys = []
    for step in range(4):
        store.begin(step, 0)
        keys += store.keep(0, 1, [routes()])
        assert held.lacking(keys[-2:]) == []
        assert len(held) == min(step + 1, 2)
        store.trained()
    monkeypatch.setattr(batch_routes, "_PASSES", 3)  # that nothing trains on are a step, too
    (held, store) = filled()
    most = 0
    for number in range(20):
        store.begin(number, 0)
        store.keep(0, 1, [routes()])
        most = max(most, len(held))
    assert most == 6


def test_a_samples_key_is_the_same_on_all_chunks_and_no_other_passes_or_replicas() -> None:
    held, store = filled()
    store.begin(5, 0)
    first = [store.keep(0, 2, [routes(1)] * 2), store.keep(0, 2, [routes(1)] * 2)]
    assert [store.keep(1, 2, [routes(3)] * 2), store.keep(1, 2, [routes(3)] * 2)] == first
    assert held.of(first[0][0]).layers == (1, 3)
    dense = store.keep(2, 2, [])
    assert dense == first[0]
    store.begin(5, 1)
    other = store.keep(0, 2, [routes()] * 2)
    store.begin(6, 0)
    last = store.keep(0, 2, [routes()] * 2)
    assert len({*first[0], *first[1], *other, *last}) == 8
    _, anew = filled()  # a rank that was started anew has seen no pass, and works the same keys out
    anew.begin(6, 0)
    assert anew.keep(0, 2, [routes()] * 2) == last


def test_what_a_pass_lends_or_refuses_goes_before_what_is_held() -> None:
    held, _ = filled()
    held.keep(9, routes(1), 0)
    held.lent = {9: routes(3), 2: InvalidRoutes("bad", expected="good", got="bad")}
    assert held.of(9).layers == (3,)
    with pytest.raises(InvalidRoutes, match="bad"):
        held.of(2)
    held.lent = {}
    assert held.of(9).layers == (1,)
    held.refuse({9: InvalidRoutes("lost", expected="a piece", got="none"), 10: routes(3)})
    assert list(held.bad([9])) == [9], "another rank can't read them"
    assert held.lacking([9, 10]) == [10]
    assert not held.nbytes
    held.has((1, 3))
    assert len(held) == 1
    held.has((1,))
    assert not len(held), "other layers drop all"


def test_with_a_top_k_of_1_zeros_of_a_rollout_are_no_route_and_recorded_ones_are_expert_0(
    tmp_path: Path,
) -> None:
    """However a rollout's come: by reference, for all chunks of an engine, or with a micro-batch."""
    model = RoutedModel(layers=(1, 3), num_layers=4, num_experts=8, topk=1)
    rows = np.zeros((8, 4, 1), np.int16)
    rows[:, [1, 3], 0] = np.arange(8)[:, None] % 7 + 1
    rows[[3, 7]] = 0
    _, reference = Putter(FileCarrier(tmp_path), model, keeps=False).put(rows, np.arange(8), 0)  # type: ignore[arg-type]
    assert reference is not None
    carried = torch.nested.as_nested_tensor([torch.from_numpy(rows)], layout=torch.jagged)
    batch = GivenRoutes.of(carried, None, model)
    ways = (
        delivery.fetch([reference])[0],
        batch.checked((1, 3), torch.arange(8)[None])[1],
        batch.routes(from_rollout=True)[0][0],
    )
    for routes in ways:
        assert isinstance(routes, RoutedExperts)
        assert routes.recorded.tolist() == [bool(row.any()) for row in rows]
    assert batch.routes(from_rollout=False)[0][0].recorded.all()
