"""ParallelLayout and DecoderLayers: bad numbers, shares of rows, and the built model.

Which layers a stage has is held against Megatron's own answer: tests/compat/megatron/test_parallel_state.py.
"""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from npu_replay import DecoderLayers, ParallelLayout, routers
from npu_replay.errors import ReplayError, RouterError
from npu_replay.module_tree import ModuleTree
from zoo.toys import ToyModel, ToyRouter, ToyRouters

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
