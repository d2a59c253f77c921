"""ParallelLayout and DecoderLayers: bad numbers, shares of rows, a HybridModel's pattern.

Which layers a stage has is held against Megatron's own answer, and against the built model:
tests/compat/megatron/test_parallel_state.py.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from choice import examples
from npu_replay import DecoderLayers, ParallelLayout, RoutedExperts, TokenLayout
from npu_replay.compat.megatron.parallel_state import decoder_layers
from npu_replay.errors import ReplayError, RouterError
from npu_replay.routers import Router, labels_of

# Bad numbers


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "ep", "etp", "dp", "vp"])
def test_a_rank_without_a_place_is_refused_by_the_axis_name(axis: str) -> None:
    with pytest.raises(ReplayError, match=rf" {axis}\..*{axis}=0,"):
        ParallelLayout(**{axis: 0})
    for rank in (-1, 2) if axis != "vp" else ():
        with pytest.raises(ReplayError, match=rf" {axis}\..*{axis}=2, {axis}_rank={rank}"):
            ParallelLayout(**{axis: 2, f"{axis}_rank": rank})


REFUSED: list[tuple[str, Callable[[], object]]] = [
    # told when the numbers are given, not when a rank asks for its layers
    ("moe_layer_freq.*Expected 4.*got 3", lambda: DecoderLayers(4, moe_layer_freq=[1, 1, 1])),
    ("moe_layer_freq.*got 0", lambda: DecoderLayers(4, moe_layer_freq=0)),
    ("pipeline layout.*Expected 4.*got 5", lambda: DecoderLayers(4, table=[[2], [3]])),
    ("got -1", lambda: DecoderLayers(-1)),
    ("moe_layer_freq", lambda: DecoderLayers(4, [-3, 1, 1, 1])),
    ("moe_layer_freq", lambda: DecoderLayers(4, [2, 1, 1, 1])),
    ("got -1", lambda: DecoderLayers(2, first_stage=-1).stage(2, 1, 0, 0)),
    # a pipeline that they don't fit
    ("Expected 2 x 2", lambda: DecoderLayers(4, table=[[2, 2]]).stage(2, 2, 0, 0)),
    ("Expected 2 x 2", lambda: DecoderLayers(4, table=[[1, 1], [2]]).stage(2, 2, 0, 0)),
    (r"no such stage.*got \(2, 0\)", lambda: DecoderLayers(8).stage(2, 2, 2, 0)),
    (r"no such stage.*got \(0, -1\)", lambda: DecoderLayers(8).stage(2, 2, 0, -1)),
    *(
        ("virtual stages.*multiple of 2, got 3", lambda end=end: DecoderLayers(7, **end).stage(2, 2, 0, 0))
        for end in ({"first_stage": 3}, {"last_stage": 3})
    ),
    ("uneven.*loss", lambda: DecoderLayers(5, first_stage=1, embedding_counts=True).stage(2, 1, 0, 0)),
    ("uneven.*loss", lambda: DecoderLayers(5, first_stage=1, loss_counts=True).stage(2, 1, 0, 0)),
    ("leave layers over", lambda: DecoderLayers(4, first_stage=3).stage(1, 1, 0, 0)),
    ("leave layers over", lambda: DecoderLayers(4, last_stage=1).stage(1, 1, 0, 0)),
    # a layout
    *(
        ("doesn't know the model's decoder layers", lambda ask=ask: getattr(ParallelLayout(), ask))
        for ask in ("chunk_layers", "layers", "moe_layers")
    ),
    ("context.*'ring'", lambda: ParallelLayout(cp=2).alignment("ring")),
]


@pytest.mark.parametrize(("words", "call"), REFUSED)
def test_bad_numbers_are_refused(words: str, call: Callable[[], object]) -> None:
    with pytest.raises(ReplayError, match=f"(?s){words}"):
        call()


# What a sequence is padded to


@pytest.mark.parametrize(
    ("sizes", "context", "multiple"),
    [
        ({"tp": 3}, "zigzag", 1),
        ({"tp": 3}, "contiguous", 1),
        ({"cp": 2}, "zigzag", 4),
        ({"cp": 2}, "contiguous", 2),
        ({"tp": 3, "sequence_parallel": True}, "zigzag", 3),
        # The embedding is cut over the tensor-parallel ranks also where the routers see all rows.
        ({"tp": 3, "sequence_parallel": True, "gathers_rows": True}, "zigzag", 3),
        ({"tp": 3, "cp": 2, "sequence_parallel": True}, "zigzag", 12),
        ({"tp": 3, "cp": 2, "sequence_parallel": True}, "contiguous", 6),
    ],
)
def test_alignment_gives_every_rank_an_equal_share(
    sizes: dict[str, Any], context: Any, multiple: int
) -> None:
    """T27: what a sequence is padded to follows tp and cp; dp has no part in it."""
    assert ParallelLayout(**sizes, dp=7, ep=3).alignment(context) == multiple


def test_numbers_may_be_numpys() -> None:
    layers = DecoderLayers(np.int64(4), np.int64(2))
    layout = ParallelLayout(tp=np.int64(2), tp_rank=torch.tensor(1), decoder=layers)
    assert (layout.tp, layout.tp_rank, layout.moe_layers) == (2, 1, (0, 2))


def test_process_groups_stay_in_their_process_where_a_copy_keeps_them() -> None:
    here = ParallelLayout(tp=2, tp_rank=1, groups=(object(),))
    assert pickle.loads(pickle.dumps(here)) == ParallelLayout(tp=2, tp_rank=1)


# The pattern of Megatron's HybridModel: its k-th E has the routes of the k-th MoE layer of a config

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
        routers = [
            Router(
                module=nn.Identity(), num_experts=EXPERTS, topk=1, shows=None, layer=layer, whole=decoder.moe
            )
            for layer in layout.moe_layers
        ]
        counts_agree = len(moe) == firsts[-1]
        for named in (layout.moe_layers, labels_of(routers)):
            shown = picked(moe, named) if mine else []
            if shown is None:
                refused += 1
                assert not counts_agree
            else:  # a config with this stage's labels and no others can't be told from this stage's part
                assert shown == mine or moe == named
    assert bool(refused) == (len(moe) != firsts[-1] > 0), "one stage at least refuses another count"
