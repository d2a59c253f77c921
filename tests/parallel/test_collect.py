"""collect on one rank: a layout is held against the order of the router's rows and the recorded tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import MicroBatchError, ParallelLayout, RoutedExperts, TokenLayout, fingerprint
from token_model import TokenModel, token_ids

pytestmark = pytest.mark.usefixtures("toy_routers")

BATCH, LENGTH = 3, 5
OTHER_ORDER = "another order of rows than the model's"


def recorded(model: TokenModel, *ids: torch.Tensor) -> list[RoutedExperts]:
    with torch.no_grad(), npu_replay.record(model) as recording:
        for one in ids:
            model(one)
    return recording.routes


def marks(ids: torch.Tensor) -> list[int]:
    return [fingerprint(row) for row in ids]


def collected(routes: list[RoutedExperts], *layouts: TokenLayout) -> list[RoutedExperts]:
    return npu_replay.collect(routes, layouts, ParallelLayout())


def padded(ids: torch.Tensor, order: Any, **more: Any) -> TokenLayout:
    return TokenLayout.padded([LENGTH] * len(ids), order=order, fingerprints=marks(ids), **more)


@pytest.mark.parametrize("order", ["sequence", "batch"])
def test_each_sequence_gets_its_own_rows(order: str) -> None:
    model, ids = TokenModel(order), token_ids(BATCH, LENGTH)
    (routes,) = recorded(model, ids)
    found = collected([routes], padded(ids, order))
    alone = recorded(model, *ids[:, None])  # each sequence by itself
    assert [one.ids.tolist() for one in found] == [one.ids.tolist() for one in alone]
    # One sequence alone has the same rows in both orders, and any layout fits.
    for layout in (padded(ids[:1], "sequence"), padded(ids[:1], "batch"), TokenLayout.packed([LENGTH])):
        assert collected(alone[:1], layout)[0].ids.tolist() == alone[0].ids.tolist()


@pytest.mark.parametrize(("order", "other"), [("sequence", "batch"), ("batch", "sequence")])
def test_a_layout_in_another_order_than_the_models_is_refused(order: str, other: str) -> None:
    ids = token_ids(BATCH, LENGTH)
    routes = recorded(TokenModel(order), ids, ids)
    with pytest.raises(MicroBatchError, match=rf"micro-batch 1.*{OTHER_ORDER}.*order='{order}'"):
        collected(routes, padded(ids, order), padded(ids, other))


def test_a_packed_layout_of_a_padded_batch_is_refused_where_rows_are_sequence_major() -> None:
    ids = token_ids(BATCH, LENGTH)
    layout = TokenLayout.packed([LENGTH] * BATCH, fingerprints=marks(ids))
    (routes,) = recorded(TokenModel("sequence"), ids)
    with pytest.raises(MicroBatchError, match=rf"{OTHER_ORDER}.*TokenLayout.padded.*\[3, 5\]"):
        collected([routes], layout)
    model = TokenModel("sequence")
    again = layout.gather(collected([routes], padded(ids, "sequence")))
    with pytest.raises(MicroBatchError, match=OTHER_ORDER), npu_replay.replay(model, [again]):
        model(ids)
    # Batch-major rows of a full batch are those of a stream; a stream has one order.
    (routes,) = recorded(TokenModel("batch"), ids)
    assert len(collected([routes], layout)) == BATCH
    (routes,) = recorded(TokenModel("sequence"), ids.view(1, -1))
    assert len(collected([routes], layout)) == BATCH


def test_layouts_of_other_tokens_than_the_recorded_ones_are_refused() -> None:
    model, first, second = TokenModel("batch"), token_ids(BATCH, LENGTH), token_ids(BATCH, LENGTH, seed=1)
    routes = recorded(model, first, second)
    right = padded(first, "batch"), padded(second, "batch")
    assert len(collected(routes, *right)) == 2 * BATCH
    with pytest.raises(MicroBatchError, match=r"micro-batch 0.*other tokens than those that the model"):
        collected(routes, *reversed(right))


def test_the_side_of_the_padding_is_held_against_the_recorded_tokens() -> None:
    ids = token_ids(BATCH, LENGTH)
    ids[:, :2] = 0  # padded on the left
    (routes,) = recorded(TokenModel("batch"), ids)
    lengths, of = [LENGTH - 2] * BATCH, marks(ids[:, 2:])
    left, right = (
        TokenLayout.padded(lengths, LENGTH, order="batch", side=side, fingerprints=of)
        for side in ("left", "right")
    )
    assert len(collected([routes], left)) == BATCH
    with pytest.raises(MicroBatchError, match="other tokens"):
        collected([routes], right)


def test_what_nobody_knows_is_taken_as_before() -> None:
    model, ids = TokenModel("batch"), token_ids(BATCH, LENGTH)
    with torch.no_grad(), npu_replay.record(model, inputs=False) as recording:
        model(ids)
    by_hand = RoutedExperts(ids=recording.routes[0].ids, layers=[0, 1], num_experts=16)
    rows = torch.arange(BATCH * LENGTH)
    for routes in (recording.routes[0], by_hand):
        for layout in (padded(ids, "batch"), TokenLayout(rows, [LENGTH] * BATCH)):
            assert len(collected([routes], layout)) == BATCH
    with pytest.raises(MicroBatchError, match=OTHER_ORDER):  # the routers say their order all the same
        collected(recording.routes, padded(ids, "sequence"))
