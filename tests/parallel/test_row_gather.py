"""Picking a rank's rows: held against the plainest way, one row after the other."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from npu_replay import InvalidRoutes, ParallelLayout, RoutedExperts, TokenLayout
from npu_replay.parallel.row_gather import pick, plan

EXPERTS, LAYERS = 12, 5


def routes(tokens: int, seed: int, layers: int = LAYERS, topk: int = 3) -> RoutedExperts:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, layers, EXPERTS, generator=generator).topk(topk).indices
    recorded = torch.rand(tokens, generator=generator) > 0.2
    return RoutedExperts(ids=ids, layers=range(layers), num_experts=EXPERTS, recorded=recorded)


LENGTHS = st.lists(st.integers(0, 9) | st.integers(20, 40), min_size=1, max_size=6)
"""The rows of longer ones are looked up one by one, where they lie in no order."""


@given(lengths=LENGTHS, seed=st.integers(0, 1000), kind=st.sampled_from(["any", "part", "packed", "padded"]))
def test_each_row_has_its_tokens_route(lengths: list[int], seed: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    if kind in ("any", "part"):
        rows = torch.randperm(total + 4, generator=generator)
        rows[rows >= total] = -1
        rows = rows[: len(rows) if kind == "any" else len(rows) // 3]
    else:
        rank = ParallelLayout(tp=2, tp_rank=seed % 2, cp=2, cp_rank=seed // 2 % 2, sequence_parallel=True)
        rows = getattr(TokenLayout, kind)(lengths, parallel=rank).rows
    # Some samples are missing, some lack their last token, some have layers that nobody asks for.
    samples = {
        number: routes(max(length - seed % 3, 0), number, LAYERS - (number + seed) % 2)
        for number, length in enumerate(lengths)
        if (number + seed) % 5
    }
    if not samples:
        return
    layers = [(1, 2), (0, 3), (2,)][seed % 3]
    found = pick(plan(rows, lengths), len(rows), samples, layers)
    where = [(number, token) for number, length in enumerate(lengths) for token in range(length)]
    for row, packed in enumerate(rows.tolist()):
        number, token = where[packed] if packed >= 0 else (-1, 0)
        sample = samples.get(number)
        there = sample is not None and token < len(sample) and bool(sample.recorded[token])
        assert bool(found.recorded[row]) == there
        for layer in layers:
            expected = sample.layer_ids(layer)[token].tolist() if sample is not None and there else [0, 0, 0]
            assert found.layer_ids(layer)[row].tolist() == expected


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, -1], [3, 0, 2, 1]])
def test_rows_that_are_marked_afterwards_have_no_ids(rows: list[int]) -> None:
    """Who takes a row's route away by the mark alone leaves its ids; zeros are what a native row has."""
    whole = RoutedExperts(ids=torch.arange(3).expand(4, LAYERS, 3) + 1, layers=range(LAYERS), num_experts=9)
    marked = whole.with_rows(whole.ids, torch.tensor([True, False, True, False]))
    found = pick(plan(torch.tensor(rows), [4]), len(rows), {0: marked}, (1, 2))
    assert found.recorded.tolist() == [row in (0, 2) for row in rows]
    assert found.ids[found.recorded].eq(torch.arange(3) + 1).all()
    assert not found.ids[~found.recorded].any()


def test_a_rank_without_rows_and_a_layout_without_tokens() -> None:
    for rows in ([], [-1, -1]):
        found = pick(plan(torch.tensor(rows, dtype=torch.int64), [4]), len(rows), {0: routes(4, 0)}, (0, 1))
        assert (len(found), int(found.recorded.sum()), found.layers) == (len(rows), 0, (0, 1))


def test_samples_of_two_models_are_refused_where_both_are_needed() -> None:
    rows, samples = torch.arange(6), {0: routes(3, 0), 1: routes(3, 1, topk=2)}
    with pytest.raises(InvalidRoutes, match=r"sequence 1: .*Expected top-3 of 12, got top-2 of 12"):
        pick(plan(rows, [3, 3]), 6, samples, (0,))
