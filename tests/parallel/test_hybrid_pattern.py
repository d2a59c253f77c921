"""The pattern of Megatron's HybridModel: its k-th E has the routes of the k-th MoE layer of a config."""

from __future__ import annotations

import itertools
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from choice import examples
from npu_replay import DecoderLayers, ParallelLayout, ReplayError, RoutedExperts, TokenLayout, delivery
from npu_replay.compat.megatron.parallel_state import decoder_layers
from npu_replay.errors import RouterError
from npu_replay.routers import Router, labels_of
from piece_files import FileCarrier

TOKENS = 3
EXPERTS = 64


def rows(labels: tuple[int, ...]) -> RoutedExperts:
    """Rows in which column k says k."""
    ids = torch.arange(len(labels)).view(1, -1, 1).expand(TOKENS, -1, 1)
    return RoutedExperts(ids=ids, layers=labels, num_experts=EXPERTS)


def says(routes: RoutedExperts) -> list[int]:
    return routes.ids[0, :, 0].tolist()


@pytest.mark.parametrize(
    ("pattern", "count", "moe"),
    [
        ("*E*E*E*E", 4, (0, 1, 2, 3)),
        ("*-*E|*E*|E/*E/*E", 4, (1, 2, 3)),
        ("GEGEGE*E", 4, (0, 1, 2, 3)),  # as Qwen3-Next
        ("+-DE", 2, (1,)),
        ("MEMEM*EMEM*E", 12, (1, 3, 6, 8, 11)),  # as Nemotron-3
        ("M-M*-", 5, ()),
    ],
)
def test_decoder_layers_are_counted_as_the_models_config_counts_them(
    pattern: str, count: int, moe: tuple[int, ...]
) -> None:
    decoder = DecoderLayers.of_pattern(pattern)
    assert (decoder.count, decoder.moe) == (count, moe)


@pytest.mark.parametrize(
    ("pattern", "pp", "vp", "first", "last", "stages"),
    [
        ("*E*E|*E*E", 2, 1, None, None, [[(0, 1)], [(2, 3)]]),
        ("*E|*E|*E|*E", 2, 2, None, None, [[(0,), (2,)], [(1,), (3,)]]),
        ("*E*|E", 2, 1, None, None, [[(0,)], [(1,)]]),  # a block is where its experts are
        ("MEM|*E-ME|", 3, 1, None, None, [[(0, 1, 2)], [(3, 4, 5, 6, 7)], [()]]),
        ("*E*E*E*E", 3, 1, 4, 3, [[(0, 1)], [()], [(2, 3)]]),
    ],
)
def test_stages_have_the_layers_that_the_pattern_gives_them(
    pattern: str, pp: int, vp: int, first: int | None, last: int | None, stages: list[list[tuple[int, ...]]]
) -> None:
    ends = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
    decoder = decoder_layers(SimpleNamespace(**ends), pattern)
    places = [[decoder.stage(pp, vp, rank, stage) for stage in range(vp)] for rank in range(pp)]
    assert places == stages
    if "|" in pattern:
        with pytest.raises(ReplayError, match=rf"has other pipeline stages. Expected {pp + 1} x {vp}"):
            decoder.stage(pp + 1, vp, 0, 0)


def test_a_stage_takes_its_own_part_of_rows_with_other_labels_of_the_whole_model() -> None:
    """Label 3 is in both counts: by the pattern it is the fourth E, by the rows' config the second."""
    decoder = DecoderLayers.of_pattern("*E|*E|*E|*E")
    here = ParallelLayout(pp=4, pp_rank=3, decoder=decoder)
    theirs = rows((1, 3, 5, 7))
    assert says(TokenLayout.packed([TOKENS]).gather([theirs], layers=here.moe_layers)) == [3]
    assert theirs.only(here.moe_layers).layers == (3,)
    assert says(theirs.only(pickle.loads(pickle.dumps(here.moe_layers)))) == [3]
    assert says(RoutedExperts.concat([theirs, rows((0, 1, 2, 3))], here.moe_layers)) == [3]
    for routes in (rows((1, 3)), rows((0, 1, 2, 3, 4))):  # 3 is in both
        with pytest.raises(RouterError, match="other MoE layers than the pattern"):
            TokenLayout.packed([TOKENS]).gather([routes], layers=here.moe_layers)


def test_pieces_that_were_cut_by_other_labels_are_refused_by_name(tmp_path: Path) -> None:
    decoder = DecoderLayers.of_pattern("*E|*E|*E|*E")
    told = FileCarrier(tmp_path, cut=1).put(rows((1, 3, 5, 7)))
    here = ParallelLayout(pp=4, pp_rank=3, decoder=decoder)
    with pytest.raises(RouterError, match=r"other labels than the model's.*\(0, 1, 2, 3\).*\(1, 3, 5, 7\)"):
        delivery.fetch([told], here)
    same = FileCarrier(tmp_path, cut=1).put(rows((0, 1, 2, 3)))
    (found,) = delivery.fetch([same], here)
    assert says(found) == [3]


# Any pattern, stages and config


@st.composite
def triples(draw: st.DrawFn) -> tuple[list[str], int, int, tuple[int, ...]]:
    """Symbols of each stage in the order of the pipeline, ranks, virtual stages, MoE layers of a config."""
    pp = draw(st.integers(1, 4))
    vp = draw(st.integers(1, 2))
    blocks = st.lists(st.sampled_from(["*E", "*-", "ME", "GE", "+E", "M-"]), min_size=1, max_size=8).map(
        "".join
    )
    symbols = draw(blocks | st.text("M*GD+-EE", min_size=1, max_size=12))
    cuts = [
        0,
        *sorted(draw(st.lists(st.integers(0, len(symbols)), min_size=pp * vp - 1, max_size=pp * vp - 1))),
    ]
    stages = [symbols[a:b] for a, b in itertools.pairwise([*cuts, len(symbols)])]
    places = [place for place, symbol in enumerate(symbols) if symbol == "E"]
    moe = draw(
        st.sampled_from([places, [place // 2 for place in places], list(range(len(places)))])
        | st.sets(st.integers(0, 15), max_size=9)
    )
    return stages, pp, vp, tuple(sorted({*moe}))


def picked(moe: tuple[int, ...], named: tuple[int, ...]) -> list[int] | None:
    """What rows of a model with these MoE layers say of these layers; None if they are refused."""
    try:
        return says(rows(moe).only(named))
    except ReplayError:
        return None


@examples(400)
@given(triples())
def test_the_kth_expert_layer_has_the_kth_routes_or_it_is_an_error(
    triple: tuple[list[str], int, int, tuple[int, ...]],
) -> None:
    stages, pp, vp, moe = triple
    decoder = DecoderLayers.of_pattern("|".join(stages))
    firsts = [0, *itertools.accumulate(stage.count("E") for stage in stages)]
    assert len(decoder.moe) == firsts[-1]
    refused = 0
    for rank in range(pp):
        mine = sorted(k for at in range(rank, pp * vp, pp) for k in range(firsts[at], firsts[at + 1]))
        layout = ParallelLayout(pp=pp, pp_rank=rank, vp=vp, decoder=decoder)
        assert layout.moe_layers == tuple(decoder.moe[k] for k in mine)
        found = [
            Router(
                module=nn.Identity(), num_experts=EXPERTS, topk=1, shows=None, layer=layer, whole=decoder.moe
            )
            for layer in layout.moe_layers
        ]
        counts_agree = len(moe) == firsts[-1]
        for named in (layout.moe_layers, labels_of(found)):
            shown = picked(moe, named) if mine else []
            if shown is None:
                refused += 1
                assert not counts_agree
            else:  # a config with this stage's labels and no others can't be told from this stage's part
                assert shown == mine or moe == named
    assert bool(refused) == (len(moe) != firsts[-1] > 0), "one stage at least refuses another count"
