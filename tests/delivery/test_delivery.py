"""put and fetch, on a carrier that any process reads; over Ray's object store: test_ray.py.

What arrives is held against what was put, whatever happened to the references on the way.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import (
    DecoderLayers,
    InvalidRoutes,
    ParallelLayout,
    ReplayError,
    RoutedExperts,
    TokenLayout,
    delivery,
)
from npu_replay.compat.ray import RayCarrier
from piece_files import FileCarrier

EXPERTS = 16
TOPK = 3
LAYERS = tuple(range(1, 13))  # layer 0 is dense


def routes(seed: int, tokens: int = 40, layers: tuple[int, ...] = LAYERS) -> RoutedExperts:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, len(layers), EXPERTS, generator=generator).topk(TOPK).indices
    return RoutedExperts(
        ids=ids,
        layers=layers,
        num_experts=EXPERTS,
        recorded=torch.rand(tokens, generator=generator) > 0.1,
        fingerprint=npu_replay.fingerprint(torch.arange(seed, seed + tokens)),
    )


STAGES = DecoderLayers(14, [0] + [1] * 13, table=[[3], [7], [4]])


@pytest.mark.parametrize("cut", [1, 5, 100, ParallelLayout(pp=3, decoder=STAGES)])
@pytest.mark.parametrize("layers", [None, (1,), (4, 5, 6), (2, 7, 12)])
def test_what_arrives_is_what_was_put(tmp_path: Path, cut: Any, layers: tuple[int, ...] | None) -> None:
    samples = [routes(seed, tokens) for seed, tokens in enumerate((40, 1, 7))]
    references = FileCarrier(tmp_path, cut=cut).put_all(samples)
    for sent, got in zip(samples, delivery.fetch(references, layers=layers), strict=True):
        assert got == (sent if layers is None else sent.only(layers))


def test_virtual_stages_of_a_rank_are_one_piece(tmp_path: Path) -> None:
    whole = ParallelLayout(pp=2, vp=3, decoder=npu_replay.DecoderLayers(12))
    sample = routes(0, layers=tuple(range(12)))
    [reference] = FileCarrier(tmp_path, cut=whole).put_all([sample], step=7)
    assert (reference.blocks, reference.step) == (((0, 1, 4, 5, 8, 9), (2, 3, 6, 7, 10, 11)), 7)
    assert delivery.fetch([reference]) == [sample]
    assert delivery.fetch([reference], replace(whole, pp_rank=1)) == [sample.only(reference.blocks[1])]


def test_what_is_gone_or_no_reference_is_an_error_in_words(tmp_path: Path) -> None:
    first = FileCarrier(tmp_path).put(routes(0))
    second = FileCarrier(tmp_path).put(routes(1))
    Path(first.handles[0][0]).unlink()
    for references, words in (
        ([second, first], r"sample 1, Reference.*can't be read.*FileNotFoundError.*were freed"),
        ([routes(0)], "sample 0: this is no reference"),
        ([None], "sample 0: this is no reference"),
    ):
        with pytest.raises(InvalidRoutes, match=words):
            delivery.fetch(references)
    assert delivery.fetch([first, second, None], on_bad_route="native") == [None, routes(1), None]
    with pytest.raises(InvalidRoutes, match="no reference"):
        delivery.fetch([routes(0)], on_bad_route="native")


def test_layers_that_nobody_put(tmp_path: Path) -> None:
    reference = FileCarrier(tmp_path).put(routes(0))
    with pytest.raises(InvalidRoutes, match=r"nobody put decoder layer 0 of this sample"):
        delivery.fetch([reference], layers=(0, 1))


def test_a_cut_that_does_not_fit(tmp_path: Path) -> None:
    shallow = FileCarrier(tmp_path, cut=ParallelLayout(pp=2, decoder=DecoderLayers(12))).put(routes(0))
    with pytest.raises(InvalidRoutes, match=r"nobody put decoder layer 12 of this sample"):
        delivery.fetch([shallow], layers=routes(0).layers)
    with pytest.raises(ReplayError, match="doesn't know the model's decoder layers"):
        RayCarrier(cut=ParallelLayout(pp=2))
    with pytest.raises(ReplayError, match="layers a piece"):
        RayCarrier(cut=0)


def test_a_stage_of_dense_layers_is_sent_nothing_and_lays_out_nothing(tmp_path: Path) -> None:
    references = FileCarrier(tmp_path, cut=2).put_all([routes(1, 5), routes(2, 7)])
    nothing = delivery.fetch(references, layers=())
    here = TokenLayout.packed([5, 7]).gather(nothing, layers=())
    assert (len(here), here.layers) == (12, ())
