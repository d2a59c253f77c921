"""collect: a layout is held against the order of the router's rows and the recorded tokens; and what ranks
send each other, with threads for ranks (tests/distributed has processes)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import MicroBatchError, ParallelLayout, RoutedExperts, TokenLayout, fingerprint
from npu_replay.parallel import collect as collecting
from simulated_ranks import Group, Rank, of_each
from zoo.toys import TokenModel, token_ids

pytestmark = pytest.mark.usefixtures("toy_routers")

BATCH = 3
LENGTH = 5
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
    model = TokenModel(order)
    ids = token_ids(BATCH, LENGTH)
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
    model = TokenModel("batch")
    first = token_ids(BATCH, LENGTH)
    second = token_ids(BATCH, LENGTH, seed=1)
    routes = recorded(model, first, second)
    right = padded(first, "batch"), padded(second, "batch")
    assert len(collected(routes, *right)) == 2 * BATCH
    with pytest.raises(MicroBatchError, match=r"micro-batch 0.*other tokens than those that the model"):
        collected(routes, *reversed(right))


def test_the_side_of_the_padding_is_held_against_the_recorded_tokens() -> None:
    ids = token_ids(BATCH, LENGTH)
    ids[:, :2] = 0  # padded on the left
    (routes,) = recorded(TokenModel("batch"), ids)
    lengths = [LENGTH - 2] * BATCH
    of = marks(ids[:, 2:])
    left, right = (
        TokenLayout.padded(lengths, LENGTH, order="batch", side=side, fingerprints=of)
        for side in ("left", "right")
    )
    assert len(collected([routes], left)) == BATCH
    with pytest.raises(MicroBatchError, match="other tokens"):
        collected([routes], right)


def test_what_nobody_knows_is_taken_as_before() -> None:
    model = TokenModel("batch")
    ids = token_ids(BATCH, LENGTH)
    with torch.no_grad(), npu_replay.record(model, inputs=False) as recording:
        model(ids)
    by_hand = RoutedExperts(ids=recording.routes[0].ids, layers=[0, 1], num_experts=16)
    rows = torch.arange(BATCH * LENGTH)
    for routes in (recording.routes[0], by_hand):
        for layout in (padded(ids, "batch"), TokenLayout(rows, [LENGTH] * BATCH)):
            assert len(collected([routes], layout)) == BATCH
    with pytest.raises(MicroBatchError, match=OTHER_ORDER):  # the routers say their order all the same
        collected(recording.routes, padded(ids, "sequence"))


# Between ranks

STAGES = ((0,), (1, 3))
LENGTHS = (9, 4)


def whole_sequences() -> list[RoutedExperts]:
    generator = torch.Generator().manual_seed(0)
    return [
        RoutedExperts(
            ids=torch.rand(length, 3, 300, generator=generator).topk(4).indices,
            layers=[0, 1, 3],
            num_experts=300,
        )
        for length in LENGTHS
    ]


@pytest.mark.parametrize("everywhere", [True, False])
@pytest.mark.parametrize("lacks", [0, 1, 2, 3])
def test_ranks_send_their_rows_in_pieces(
    lacks: int, everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages of two context parallel ranks. One of them has no routes of its first and last row."""
    whole = whole_sequences()
    rows, stages = (Group(1, 3), Group(5, 7)), (Group(1, 5), Group(3, 7))
    monkeypatch.setattr(collecting, "PIECE", 40)  # five rows of the first stage, two of the second

    def layout_of(rank: int) -> TokenLayout:
        parallel = ParallelLayout(cp=2, cp_rank=rank % 2, pp=2, pp_rank=rank // 2)
        return TokenLayout.packed(LENGTHS, parallel=parallel)

    def work(rank: int) -> list[RoutedExperts] | None:
        layout = layout_of(rank)
        number = 2 * rank + 1
        routes = layout.gather(whole, layers=STAGES[rank // 2])
        if rank == lacks:
            routes = routes.take([-1, *range(1, len(routes) - 1), -1])
        groups: Any = [Rank(rows[rank // 2], number), Rank(stages[rank % 2], number)]
        return npu_replay.collect([routes], [layout], groups, everywhere=everywhere)

    first, *others = of_each(work, 4)
    assert others == [first if everywhere else None] * 3
    held = layout_of(lacks).rows
    missing = held[[0, -1]][held[[0, -1]] >= 0]
    recorded = torch.ones(sum(LENGTHS), dtype=torch.bool).index_fill(0, missing, False)
    for one, right, known in zip(first, whole, recorded.split(LENGTHS), strict=True):
        assert torch.equal(one.recorded, known)
        assert torch.equal(one.ids, right.ids * known[:, None, None])


def test_ranks_get_what_they_lack_from_the_first_that_holds_it() -> None:
    left, right = whole_sequences()
    held: list[dict[int, RoutedExperts]] = [{}, {7: left}, {7: right, 8: right}]
    lacking, group = [[7, 8, 9], [8], []], Group(2, 4, 6)
    found = of_each(lambda rank: collecting.exchange(held[rank], lacking[rank], Rank(group, 2 * rank + 2)), 3)
    assert found == [{7: left, 8: right}, {8: right}, {}]
