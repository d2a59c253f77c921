"""The store of an engine's routes by key, and what R2 puts there, without verl."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from npu_replay import InvalidRoutes, RoutedExperts, RoutedModel
from npu_replay.compat.verl import batch_routes
from npu_replay.compat.verl.batch_routes import R2Store, RoutesByKey, keys_in, keys_in_place, rows_of

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


def test_a_batch_has_keys_for_the_length_of_a_pass() -> None:
    held, _ = filled()
    marks = [torch.full((n, 1, 1), 32767, dtype=torch.int16) for n in (6, 4)]
    data: dict[str, Any] = {"routes": torch.nested.as_nested_tensor(marks, layout=torch.jagged)}
    given = data["routes"]
    references = [SimpleNamespace(key=2**63 + 7), None]
    keys = keys_in(given, references)
    assert keys == [2**63 + 7, 1]
    with keys_in_place(data, "routes", keys):
        assert keys_in(data["routes"]) == keys
    assert data["routes"] is given
    with pytest.raises(InvalidRoutes, match="aren't here"):
        held.of_sample(rows_of(1, 4), None, MODEL)


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


def test_rows_that_are_not_to_be_replayed_have_no_route_and_those_of_several_samples_are_refused() -> None:
    held, _ = filled()
    held.keep(9, routes(1), 0)
    rows = rows_of(9, TOKENS)
    keep = torch.arange(TOKENS) < 3
    rows[1] = 0
    assert held.of_sample(rows, keep, MODEL).recorded.tolist() == [True, False, True, False, False, False]
    assert len(held.of_sample(rows_of(9, TOKENS + 1), None, MODEL)) == TOKENS, "an engine has no last row"
    with pytest.raises(InvalidRoutes, match="another number of tokens"):
        held.of_sample(rows_of(9, TOKENS + 2), None, MODEL)
    rows[2] = rows_of(8, 1)[0]
    with pytest.raises(InvalidRoutes, match="belong to several"):
        held.of_sample(rows, None, MODEL)
