"""ParallelLayout and DecoderLayers: which layers and which share of the rows a rank has."""

from __future__ import annotations

import copy
import itertools
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from choice import examples
from npu_replay import DecoderLayers, ParallelLayout, routers
from npu_replay.errors import ReplayError, RouterError
from npu_replay.module_tree import ModuleTree
from zoo.toys import ToyModel, ToyRouter, ToyRouters

# Which decoder layers, against layers that are dealt out one by one


def stages(
    count: int,
    pp: int,
    vp: int = 1,
    *,
    first_stage: int | None = None,
    last_stage: int | None = None,
    embedding_counts: bool = False,
    loss_counts: bool = False,
    table: Sequence[Sequence[int]] | None = None,
) -> dict[tuple[int, int], list[int]] | None:
    """(stage, virtual stage) -> its decoder layers, dealt out one by one; None if they don't come out even.

    The chunks of virtual stage 0 come first, on every stage, then those of virtual stage 1.
    """
    things: list[str | int] = [
        *(["embedding"] if embedding_counts else []),
        *range(count),
        *(["loss"] if loss_counts else []),
    ]
    room = _room(len(things), pp, vp, first_stage, last_stage) if table is None else table
    if room is None or sum(sum(row) for row in room) != len(things):
        return None
    dealt: dict[tuple[int, int], list[int]] = {}
    for vp_rank in range(vp):
        for pp_rank in range(pp):
            here = [things.pop(0) for _ in range(room[pp_rank][vp_rank])]
            dealt[pp_rank, vp_rank] = [thing for thing in here if isinstance(thing, int)]
    assert not things
    return dealt


def _room(things: int, pp: int, vp: int, first: int | None, last: int | None) -> list[list[int]] | None:
    """How many things each chunk takes."""
    fixed = {rank: size for rank, size in ((0, first), (pp - 1, last)) if size is not None}
    left = things - sum(fixed.values())
    others = pp - len(fixed)
    if left < 0 or (others and left % others):
        return None
    stage_room = [fixed.get(rank, left // max(others, 1)) for rank in range(pp)]
    return None if any(room % vp for room in stage_room) else [[room // vp] * vp for room in stage_room]


def has_router(layer: int, moe_layer_freq: int | Sequence[int]) -> bool:
    """An integer n: every n-th layer, from the first; a list: one entry a layer."""
    if isinstance(moe_layer_freq, int):
        return layer % moe_layer_freq == 0
    return bool(moe_layer_freq[layer])


@st.composite
def pipelines(draw: st.DrawFn) -> dict[str, Any]:
    """Sizes that come out even: stage sizes are drawn, and the number of layers follows."""
    pp = draw(st.integers(1, 4))
    vp = draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["even", "uneven", "counted", "table"]))
    share = draw(st.integers(0, 3)) * vp
    split: dict[str, Any] = {"pp": pp, "vp": vp}
    if kind == "table":
        table = [[draw(st.integers(0, 3)) for _ in range(vp)] for _ in range(pp)]
        return split | {"count": sum(map(sum, table)), "table": table}
    if kind == "uneven" and pp > 1:
        ends = draw(st.sampled_from([("first_stage",), ("last_stage",), ("first_stage", "last_stage")]))
        sizes = {end: draw(st.integers(0, 3)) * vp for end in ends}
        return split | sizes | {"count": share * (pp - len(ends)) + sum(sizes.values())}
    if kind == "counted" and pp > 1:
        counts = {"embedding_counts": draw(st.booleans()), "loss_counts": draw(st.booleans())}
        return split | counts | {"count": max(share, vp) * pp - sum(counts.values())}
    return split | {"count": share * pp}


@examples(500)
@given(pipeline=pipelines(), data=st.data(), more=st.sampled_from([0, 0, 1, -1, -7]))
def test_layers_are_where_dealing_them_out_one_by_one_puts_them(
    pipeline: dict[str, Any], data: st.DataObject, more: int
) -> None:
    """T2, T3: labels are global decoder layers, dense ones counted, on every virtual stage. What doesn't come
    out even is refused."""
    if "table" not in pipeline:
        pipeline["count"] = max(0, pipeline["count"] + more)
    count = pipeline["count"]
    freq = data.draw(st.integers(1, 5) | st.lists(st.integers(0, 1), min_size=count, max_size=count))
    about = {name: value for name, value in pipeline.items() if name not in ("count", "pp", "vp")}
    model = DecoderLayers(count, moe_layer_freq=freq, **about)
    pp = pipeline["pp"]
    vp = pipeline["vp"]
    dealt = stages(**pipeline)
    places = [*itertools.product(range(pp), range(vp))]
    if dealt is None:
        for place in places:
            with pytest.raises(ReplayError, match=r"Expected.*got.*Usual cause"):
                model.stage(pp, vp, *place)
        return
    assert {place: list(model.stage(pp, vp, *place)) for place in places} == dealt
    for pp_rank in range(pp):
        here = ParallelLayout(pp=pp, pp_rank=pp_rank, vp=vp, decoder=model)
        assert here.chunk_layers == tuple(tuple(dealt[pp_rank, vp_rank]) for vp_rank in range(vp))
        layers = sorted(layer for chunk in here.chunk_layers for layer in chunk)
        assert here.layers == tuple(layers)
        assert here.moe_layers == tuple(layer for layer in layers if has_router(layer, freq))


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
    ("got.*-1", lambda: DecoderLayers(2, table=[[3], [-1]])),
    ("got -1", lambda: DecoderLayers(-1)),
    ("moe_layer_freq", lambda: DecoderLayers(4, [-3, 1, 1, 1])),
    ("moe_layer_freq", lambda: DecoderLayers(4, [2, 1, 1, 1])),
    ("got -1", lambda: DecoderLayers(2, first_stage=-1).stage(2, 1, 0, 0)),
    # a pipeline that they don't fit
    ("Expected 2 x 2", lambda: DecoderLayers(4, table=[[2, 2]]).stage(2, 2, 0, 0)),
    ("Expected 2 x 2", lambda: DecoderLayers(4, table=[[1, 1], [2]]).stage(2, 2, 0, 0)),
    ("uneven.*loss", lambda: DecoderLayers(5, first_stage=1, embedding_counts=True).stage(2, 1, 0, 0)),
    ("uneven.*loss", lambda: DecoderLayers(5, first_stage=1, loss_counts=True).stage(2, 1, 0, 0)),
    (r"no such stage.*got \(2, 0\)", lambda: DecoderLayers(8).stage(2, 2, 2, 0)),
    (r"no such stage.*got \(0, -1\)", lambda: DecoderLayers(8).stage(2, 2, 0, -1)),
    *(
        ("virtual stages.*multiple of 2, got 3", lambda end=end: DecoderLayers(7, **end).stage(2, 2, 0, 0))
        for end in ({"first_stage": 3}, {"last_stage": 3})
    ),
    ("the one stage has all", lambda: DecoderLayers(4, first_stage=3).stage(1, 1, 0, 0)),
    ("the one stage has all", lambda: DecoderLayers(4, last_stage=1).stage(1, 1, 0, 0)),
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


# The built model is the truth


@pytest.mark.usefixtures("toy_routers")
@pytest.mark.parametrize("labels", [(2, 3), (0,), (0, 1, 2)])
def test_check_refuses_routers_in_other_layers(labels: tuple[int, ...]) -> None:
    """T3: labels shifted by a wrong offset are an error, not a shifted replay."""
    layout = ParallelLayout(pp=2, pp_rank=0, decoder=DecoderLayers(4))
    model = ToyModel(*(ToyRouter(layer=label) for label in labels))
    said = rf"pipeline rank 0 of 2.*Expected \[0, 1\], got {re.escape(str(list(labels)))}"
    with pytest.raises(RouterError, match=said):
        layout.check(model)


class DenseStages(ToyRouters):
    """A kind that says of all chunks that it is right for them to have no router."""

    def accepts_none(self, chunks: Sequence[ModuleTree]) -> bool:
        return all(isinstance(chunk.model, ToyModel) for chunk in chunks)


@pytest.mark.usefixtures("toy_routers")
def test_check_holds_a_stage_of_dense_layers_against_the_config_too() -> None:
    """T43: a stage without routers is no error where the config says so, and one where it doesn't."""
    dense = ToyModel(ToyRouter(layer=0))
    dense.layers[0].router = None
    model = DecoderLayers(4, moe_layer_freq=[0, 0, 1, 1])
    first, second = (ParallelLayout(pp=2, pp_rank=rank, decoder=model) for rank in range(2))
    with pytest.raises(RouterError, match="no router in this model"):
        second.check(dense)
    routers.register("toy", DenseStages())
    first.check(dense)
    with pytest.raises(RouterError, match=r"Expected \[2, 3\], got \[\]"):
        second.check(dense)


def test_numbers_may_be_numpys_and_repr_says_what_differs_from_a_process_alone() -> None:
    layers = DecoderLayers(np.int64(4), np.int64(2))
    layout = ParallelLayout(tp=np.int64(2), tp_rank=torch.tensor(1), decoder=layers)
    assert (layout.tp, layout.tp_rank, layout.moe_layers) == (2, 1, (0, 2))
    layout = ParallelLayout(tp=2, pp=4, pp_rank=3, sequence_parallel=True, groups=("a group",))
    assert repr(layout) == "ParallelLayout(tp=2, tp_rank=0, pp=4, pp_rank=3, sequence_parallel=True)"
    assert eval(repr(layout)) == replace(layout, groups=())


def test_process_groups_stay_in_their_process_where_a_copy_keeps_them() -> None:
    here = ParallelLayout(tp=2, tp_rank=1, groups=(object(),))
    assert pickle.loads(pickle.dumps(here)) == ParallelLayout(tp=2, tp_rank=1)
    assert copy.copy(here).groups == copy.deepcopy(here).groups == here.groups
