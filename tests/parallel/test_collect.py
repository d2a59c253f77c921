"""collect: a layout is held against the order of the router's rows and the recorded tokens; and what ranks
send each other, with threads for ranks (tests/distributed has processes)."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import npu_replay
from choice import examples
from npu_replay import MicroBatchError, ParallelLayout, RoutedExperts, TokenLayout, fingerprint
from npu_replay.parallel import collect as collecting
from npu_replay.routes.routed_experts import without_layers
from parallel.drawn_batches import Batch, batches
from simulated_ranks import Group, Rank, of_each
from zoo.outcome import random_routes
from zoo.toys import TokenModel, token_ids

pytestmark = pytest.mark.usefixtures("toy_routers")

BATCH = 3
LENGTH = 5
OTHER_ORDER = "another order of rows than the model's"


def recorded(model: TokenModel, *ids: torch.Tensor) -> list[RoutedExperts]:
    with torch.no_grad(), npu_replay.record(model) as recording:
        for batch in ids:
            model(batch)
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
    sequences = collected([routes], padded(ids, order))
    alone = recorded(model, *ids[:, None])  # each sequence by itself
    assert [sequence.ids.tolist() for sequence in sequences] == [sequence.ids.tolist() for sequence in alone]
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


# Between ranks


def sequences_of(draw: Any, batch: Batch, layers: tuple[int, ...]) -> list[RoutedExperts]:
    """Its sequences' routes, with rows that have none: more experts than a byte holds (T19)."""
    count = sum(batch.lengths)
    known = torch.tensor(draw(st.lists(st.booleans(), min_size=count, max_size=count)), dtype=torch.bool)
    (whole,) = random_routes([count], layers, 300, 4, seed=count, recorded=known)
    ends = itertools.accumulate(batch.lengths, initial=0)
    return [whole.take(range(*pair)) for pair in itertools.pairwise(ends)]


@pytest.mark.slow
@examples(150)
@given(batch=batches(), data=st.data(), everywhere=st.booleans(), piece=st.sampled_from([40, 1 << 20]))
def test_to_gather_and_to_collect_is_the_identity_for_any_split(
    batch: Batch, data: st.DataObject, everywhere: bool, piece: int
) -> None:
    """Rows over tensor and context parallel ranks, which may all have the same (T46), layers over stages of
    which one may have none (T43), and a row whose route is missing on any rank is missing in the whole."""
    stages = data.draw(st.sampled_from([((0, 1, 3),), ((0, 3), (1,)), ((0,), (), (1, 3))]))
    whole = sequences_of(data.draw, batch, (0, 1, 3))
    if not any(bool(sequence.recorded.any()) for sequence in whole):
        return
    places = [*batch.ranks()]
    rows = [Group(*range(stage, 99, len(stages))[: len(places)]) for stage in range(len(stages))]
    columns = [Group(*range(len(stages) * place, 99)[: len(stages)]) for place in range(len(places))]
    layouts = [batch.layout(place) for place in places]
    place, stage = divmod(data.draw(st.integers(0, len(places) * len(stages) - 1)), len(stages))
    lost = layouts[place].rows[:1]  # of the first row of this rank, if no other one holds its token
    holders = sum(int((layout.rows == lost).sum()) for layout in layouts)
    loses = place * len(stages) + stage if holders == 1 and lost >= 0 and stages[stage] else -1

    def work(rank: int) -> list[RoutedExperts] | None:
        place, stage = divmod(rank, len(stages))
        routes = layouts[place].gather(whole, layers=stages[stage], on_bad_route="native", ceiling=1)
        if rank == loses:
            routes = routes.take([-1, *range(1, len(routes))])
        part = routes if stages[stage] else without_layers()
        groups: Any = [Rank(rows[stage], rank), Rank(columns[place], rank)]
        return npu_replay.collect([part], [layouts[place]], groups, everywhere=everywhere)

    with mock.patch.object(collecting, "PIECE", piece):
        first, *others = of_each(work, len(places) * len(stages))
    assert others == [first if everywhere else None] * len(others)
    known = torch.cat([sequence.recorded for sequence in whole])
    if loses >= 0:
        known[lost] = False
    joined = RoutedExperts.concat(first)
    assert torch.equal(joined.recorded, known)
    assert torch.equal(joined.ids, torch.cat([sequence.ids for sequence in whole]) * known[:, None, None])


def test_a_token_without_a_route_in_one_stages_layers_has_none() -> None:
    (first,), (second,) = (
        random_routes([3], (layer,), 8, 2, seed=0, recorded=torch.arange(3) != layer) for layer in range(2)
    )
    stages, layout, group = [first, second], TokenLayout.packed([3]), Group(0, 1)
    (whole,), _ = of_each(lambda rank: npu_replay.collect([stages[rank]], [layout], [Rank(group, rank)]), 2)
    assert whole.recorded.tolist() == [False, False, True]


def test_ranks_get_what_they_lack_from_the_first_that_holds_it() -> None:
    left, right = random_routes([9, 4], (0, 1, 3), 300, 4, seed=0)
    stored: list[dict[int, RoutedExperts]] = [{}, {7: left}, {7: right, 8: right}]
    lacking, group = [[7, 8, 9], [8], []], Group(2, 4, 6)
    received = of_each(
        lambda rank: collecting.exchange(stored[rank], lacking[rank], Rank(group, 2 * rank + 2)), 3
    )
    assert received == [{7: left, 8: right}, {8: right}, {}]
