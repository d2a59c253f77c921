"""Rows out of a framework's batch: a layer that is the same for every token may be right."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from npu_replay import RoutedModel
from npu_replay.compat.verl import tensors
from npu_replay.compat.verl.tensors import GivenRoutes
from npu_replay.errors import InvalidRoutes
from npu_replay.rollout.admit import from_batch

MODEL = RoutedModel(layers=tuple(range(32)), num_layers=32, num_experts=8, topk=2)
TOKENS = 96


@pytest.mark.parametrize(
    ("merged", "keys", "experts", "wire"),
    [
        (torch.int16, False, 300, (torch.int16, False)),  # 0.9.1
        (torch.int16, True, 8, (torch.int16, False)),
        (torch.uint8, False, 256, (torch.uint8, False)),  # 0.9.0
        (torch.uint8, False, 384, (torch.int16, True)),
        (torch.uint8, True, 8, (torch.int16, True)),
        (None, False, 256, (torch.uint8, False)),
        (None, False, 257, (torch.int16, True)),  # 0.7 and 0.8 would fold these: they go as bytes
        (None, True, 8, (torch.int16, True)),
    ],
)
def test_no_id_is_folded_on_verls_wire(
    merged: torch.dtype | None, keys: bool, experts: int, wire: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    utils = SimpleNamespace()
    if merged is not None:
        utils.merge_nested_router_maps = lambda maps: maps[0].to(merged)
    monkeypatch.setattr(tensors, "utils", lambda: utils)
    assert tensors.wire_dtype(SimpleNamespace(num_moe_experts=experts), keys=keys) == wire


def rows_with_a_constant_layer() -> torch.Tensor:
    rows = np.argsort(np.random.default_rng(0).random((TOKENS, 32, 8)), axis=2)[..., :2]
    rows[:, 5] = [0, 1]
    return torch.from_numpy(rows)


def test_experts_in_the_column_of_a_dense_layer_are_refused() -> None:
    """Labels have shifted by a layer; -1 there is no expert."""
    model = RoutedModel(layers=tuple(range(1, 32)), num_layers=32, num_experts=8, topk=2)
    rows = rows_with_a_constant_layer()
    rows[:, 5] = rows[:, 6]
    with pytest.raises(InvalidRoutes, match=r"layer 0: a dense layer has experts.*in row 0"):
        from_batch(rows, model, zeros_are_none=True)
    for blank in (-1, 0):
        rows[:, 0] = blank
        assert from_batch(rows, model, zeros_are_none=True).recorded.all()


def test_a_stage_of_verls_that_holds_the_dead_router_alone_takes_its_routes() -> None:
    """Its column is held against those of all stages; one that nobody wrote into is bad on each of them."""
    rows = rows_with_a_constant_layer()
    tokens = torch.arange(len(rows))[None]
    unwritten = GivenRoutes.of(torch.nested.nested_tensor([rows], layout=torch.jagged), None, MODEL).checked(
        [9], tokens
    )
    assert isinstance(unwritten[1], InvalidRoutes)
    rows[:, 5] = torch.tensor([3, 6])
    (routes,) = (
        GivenRoutes.of(torch.nested.nested_tensor([rows], layout=torch.jagged), None, MODEL)
        .checked([5, 99], tokens)
        .values()
    )
    assert (routes.layers, routes.ids.unique().tolist()) == ((5,), [3, 6])


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("zeros_are_none", [True, False])
def test_a_row_of_minus_one_in_all_moe_layers_has_no_route(zeros_are_none: bool, topk: int) -> None:
    """Whatever dense layers hold there. Anything else that holds -1 is refused where a route is due."""
    model = RoutedModel(layers=(1, 3), num_layers=4, num_experts=8, topk=topk)
    rows = torch.zeros(6, 4, topk, dtype=torch.int16)
    rows[:, [1, 3]] = torch.arange(1, 1 + topk, dtype=torch.int16)
    rows[2:4, [1, 3]] = -1
    rows[3:5, [0, 2]] = -1
    routes = from_batch(rows, model, zeros_are_none=zeros_are_none)
    assert routes.recorded.tolist() == [True, True, False, False, True, True]
    assert torch.equal(from_batch(rows[:, [1, 3]], model, zeros_are_none=zeros_are_none).ids, routes.ids)
    for layer in (1, 3):
        partly = rows.clone()
        partly[5, layer, topk - 1] = -1
        with pytest.raises(InvalidRoutes, match=f"layer {layer}: an id is out of range, the first in row 5"):
            from_batch(partly, model, zeros_are_none=zeros_are_none)
        from_batch(partly, model, zeros_are_none=zeros_are_none, keep=torch.arange(6) < 5)


def test_a_row_that_somebody_filled_with_consecutive_ids_has_no_route() -> None:
    """0 to k-1 in all layers, as slime, SkyRL and NeMo-RL pad; a trainer's own routers may choose so."""
    rows = torch.rand(9, 32, 8, generator=torch.Generator().manual_seed(0)).topk(2).indices
    rows[[3, 8]] = torch.arange(2)
    assert np.flatnonzero(~from_batch(rows, MODEL, zeros_are_none=True).recorded.numpy()).tolist() == [3, 8]
    last = from_batch(rows, MODEL, zeros_are_none=np.arange(9) == 8)
    assert np.flatnonzero(~last.recorded.numpy()).tolist() == [8]
    for how in ({"zeros_are_none": False}, {"zeros_are_none": True, "from_engine": False}):
        assert from_batch(rows, MODEL, **how).recorded.all()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.bfloat16, torch.bool])
def test_ids_of_any_integers_are_taken_and_no_other_numbers(dtype: torch.dtype) -> None:
    rows = torch.rand(9, 32, 8, generator=torch.Generator().manual_seed(0)).topk(2).indices
    if dtype in (torch.bfloat16, torch.bool):
        with pytest.raises(InvalidRoutes, match="ids must be an array of integers"):
            from_batch(rows.to(dtype), MODEL, zeros_are_none=True)
    else:
        assert torch.equal(from_batch(rows.to(dtype), MODEL, zeros_are_none=True).ids.long(), rows)
