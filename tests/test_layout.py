"""TokenLayout of padded batches: rows of the router, padding, last tokens, other sequences' routes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_replay import ReplayError, RoutedExperts, TokenLayout, fingerprint

LAYERS, EXPERTS, TOPK = (1, 4), 8, 2


def routes(tokens: int, seed: int, **about: object) -> RoutedExperts:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, len(LAYERS), EXPERTS, generator=generator).topk(TOPK).indices
    return RoutedExperts(ids=ids, layers=LAYERS, num_experts=EXPERTS, **about)


def test_rows_are_sequence_major_for_megatron_and_batch_major_for_hugging_face() -> None:
    """T44: batch-major rows in a sequence-major router are wrong in silence."""
    assert TokenLayout.padded([3, 2], 4).rows.tolist() == [0, 3, 1, 4, 2, -1, -1, -1]
    assert TokenLayout.padded([3, 2], 4, order="batch").rows.tolist() == [0, 1, 2, -1, 3, 4, -1, -1]
    assert TokenLayout.padded([3, 2], side="left").rows.tolist() == [0, -1, 1, 3, 2, 4]


def test_each_token_gets_its_own_route_and_padding_none() -> None:
    one, two = routes(3, 1), routes(2, 2)
    gathered = TokenLayout.padded([3, 2], 4).gather([one, two])
    assert gathered.recorded.tolist() == [True] * 5 + [False] * 3
    grid = gathered.ids.view(4, 2, len(LAYERS), TOPK)
    assert torch.equal(grid[:3, 0], one.ids)
    assert torch.equal(grid[:2, 1], two.ids)


def test_a_last_token_without_a_row_has_no_route() -> None:
    """T27: it is sampled and never fed to the engine; it is not expert 0."""
    gathered = TokenLayout.padded([3, 2]).gather([routes(2, 1), routes(1, 2)])
    assert gathered.recorded.view(3, 2).tolist() == [[True, True], [True, False], [False, False]]


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    extra=st.integers(0, 3),
    side=st.sampled_from(["left", "right"]),
    order=st.sampled_from(["sequence", "batch"]),
)
def test_scatter_is_the_inverse_of_gather(lengths: list[int], extra: int, side: str, order: str) -> None:
    layout = TokenLayout.padded(lengths, max(lengths) + extra, side=side, order=order)
    batch = [routes(length, number) for number, length in enumerate(lengths)]
    assert layout.scatter(layout.gather(batch)) == batch


def test_another_sequences_routes_are_refused() -> None:
    tokens = torch.arange(3)
    layout = TokenLayout.padded([3], fingerprints=[fingerprint(tokens)])
    layout.gather([routes(3, 1, fingerprint=fingerprint(tokens))])
    layout.gather([routes(3, 1)])
    with pytest.raises(ReplayError, match=r"sequence 0.*other tokens.*Usual cause: retokenised"):
        layout.gather([routes(3, 1, fingerprint=fingerprint(tokens + 1))])


def test_what_does_not_fit_is_refused_by_name() -> None:
    layout = TokenLayout.padded([3, 2], 4)
    with pytest.raises(ReplayError, match=r"another number of sequences.*Expected 2, got 1"):
        layout.gather([routes(3, 1)])
    for wrong in (1, 4):
        with pytest.raises(ReplayError, match=rf"sequence 0.*Expected 3 \(or 2.*got {wrong}"):
            layout.gather([routes(wrong, 1), routes(2, 2)])
    with pytest.raises(ReplayError, match=r"another number of rows.*Expected 8, got 7"):
        layout.scatter(routes(7, 1))
    with pytest.raises(ReplayError, match="longer than what the batch is padded to"):
        TokenLayout.padded([3, 5], 4)
