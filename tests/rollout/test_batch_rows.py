"""Rows out of a framework's batch: a layer that is the same for every token may be right."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from npu_replay import RoutedExperts, RoutedModel
from npu_replay.compat.verl.carried import checked
from npu_replay.errors import InvalidRoutes
from npu_replay.rollout.batch_rows import from_batch
from npu_replay.routes import checks

MODEL = RoutedModel(layers=tuple(range(32)), num_layers=32, num_experts=8, topk=2)
TOKENS = 96


def rows_with_a_constant_layer() -> torch.Tensor:
    rows = np.argsort(np.random.default_rng(0).random((TOKENS, 32, 8)), axis=2)[..., :2]
    rows[:, 5] = [0, 1]
    return torch.from_numpy(rows)


def test_it_is_refused_where_nothing_is_known_of_the_tokens() -> None:
    with pytest.raises(InvalidRoutes, match="layer 5: all 96 recorded rows are the same"):
        from_batch(rows_with_a_constant_layer(), MODEL, zeros_are_none=True)


def test_few_different_tokens_explain_it_as_they_do_at_the_door() -> None:
    rows, tokens = rows_with_a_constant_layer(), np.arange(TOKENS)
    assert from_batch(rows, MODEL, zeros_are_none=True, tokens=tokens % 12).recorded.all()
    with pytest.raises(InvalidRoutes, match="layer 5"):
        from_batch(rows, MODEL, zeros_are_none=True, tokens=tokens)


def test_a_trainers_own_routers_may_choose_so() -> None:
    """R2's record says what the model did: an engine's faults aren't looked for."""
    routes = from_batch(rows_with_a_constant_layer(), MODEL, zeros_are_none=True, vouched=True)
    assert routes.recorded.all()
    assert len(RoutedExperts.from_bytes(routes.to_bytes())) == TOKENS, "a file of the record is read again"


def test_a_dead_router_beside_live_ones_is_let_in(caplog: pytest.LogCaptureFixture) -> None:
    checks._warn_of_dead_routers.cache_clear()
    rows = rows_with_a_constant_layer()
    rows[:, 5] = torch.tensor([3, 6])
    for _ in range(2):
        assert from_batch(rows, MODEL, zeros_are_none=True).only([5]).recorded.all()
    assert [record.getMessage()[:50] for record in caplog.records] == [
        "[npu_replay] layer 5 sends all tokens to the same "
    ]


def test_a_stage_of_verls_that_holds_the_dead_router_alone_takes_its_routes() -> None:
    """Its column is held against those of all stages; one that nobody wrote into is bad on each of them."""
    rows = rows_with_a_constant_layer()
    unwritten = checked(torch.nested.nested_tensor([rows], layout=torch.jagged), MODEL, [9])
    assert isinstance(unwritten[1], InvalidRoutes)
    rows[:, 5] = torch.tensor([3, 6])
    (found,) = checked(torch.nested.nested_tensor([rows], layout=torch.jagged), MODEL, [5, 99]).values()
    assert isinstance(found, RoutedExperts)
    assert (found.layers, found.ids.unique().tolist()) == ((5,), [3, 6])
