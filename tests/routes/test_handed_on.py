"""What is known of routes beside their ids goes wherever this library hands them on, and no further."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import (
    InvalidRoutes,
    MicroBatchError,
    ParallelLayout,
    RoutedExperts,
    TokenLayout,
    delivery,
)
from npu_replay.compat.verl.batch_routes import RoutesByKey
from npu_replay.parallel.merge import Block, Union, side_by_side
from npu_replay.routes.inputs import Inputs
from npu_replay.routes.routed_experts import Placement
from npu_replay.routes.store import RoutesByTokens
from piece_files import FileCarrier
from routes.test_encoding import FORMS
from zoo.toys import TokenModel, token_ids

pytestmark = pytest.mark.usefixtures("toy_routers")

TOKENS = 80
LAYERS = (1, 3)


def favourite(**known: Any) -> RoutedExperts:
    """Routes of which one layer has one favourite: as a record they are right, and from outside a fault."""
    ids = torch.rand(TOKENS, 2, 8, generator=torch.Generator().manual_seed(0)).topk(2).indices
    ids[:, 1] = torch.tensor([0, 1])
    mark = npu_replay.fingerprint(range(TOKENS))
    return RoutedExperts(ids=ids, layers=LAYERS, num_experts=8, fingerprint=mark).with_known(**known)


def merged(routes: RoutedExperts) -> RoutedExperts:
    """What two ranks with half of the tokens each collect."""
    first = torch.arange(TOKENS) < TOKENS // 2
    blocks = [Block(mask, routes.take(mask)) for mask in (first, ~first)]
    union = Union(0, [block.part() for block in blocks])
    for block in blocks:
        union.put(block.part(), 0, block.rows(0, len(block.routes)))
    return union.block().routes


def fetched(routes: RoutedExperts) -> RoutedExperts:
    with TemporaryDirectory() as folder:
        return delivery.fetch([FileCarrier(Path(folder)).put(routes)], layers=LAYERS)[0]


def kept_by_tokens(routes: RoutedExperts) -> RoutedExperts:
    kept = RoutesByTokens(1 << 20)
    kept.put(1, routes.sequence(0, TOKENS - 1), rollout=False)
    return kept.get(1)[0]


def kept_by_chunks(routes: RoutedExperts) -> RoutedExperts:
    kept = RoutesByKey()
    for layer in LAYERS:
        kept.add_layers(1, routes.only([layer]), 0)
    return kept.of(1)


LAYOUT = TokenLayout.padded([TOKENS])

SAME_ROWS: dict[str, Callable[[RoutedExperts], RoutedExperts]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda routes: pickle.loads(pickle.dumps(routes)),
    "an old pickle": lambda routes: pickle.loads(pickle.dumps(routes, protocol=2)),
    "all its layers": lambda routes: routes.only(LAYERS),
    "a layer": lambda routes: routes.only([3]),
}
WAYS: dict[str, Callable[[RoutedExperts], RoutedExperts]] = SAME_ROWS | {
    "take": lambda routes: routes.take(range(TOKENS)),
    "sequence": lambda routes: routes.sequence(0, 70),
    "of a sample": lambda routes: routes.of_sample("a"),
    "concat": lambda routes: RoutedExperts.concat([routes, routes]),
    "concat of layers": lambda routes: RoutedExperts.concat([routes, routes], [3]),
    "gather": lambda routes: LAYOUT.gather([routes]),
    "scatter": lambda routes: LAYOUT.scatter(routes)[0],
    "collect, alone": lambda routes: npu_replay.collect([routes], [LAYOUT], ParallelLayout())[0],
    "collect of two ranks": merged,
    **{name: form.round_trip for name, form in FORMS.items()},
    "layers side by side": lambda routes: side_by_side([routes.only([layer]) for layer in LAYERS]),
    "verl's chunks": kept_by_chunks,
    "held by its tokens": kept_by_tokens,
    "a carrier": fetched,
}


PLACEMENT = Placement(
    bad_samples=3,
    row_order="batch",
    inputs=Inputs(None, (TOKENS,), (npu_replay.fingerprint(range(TOKENS)),)),
    rows=torch.arange(TOKENS),
    lengths=(TOKENS,),
)


@pytest.mark.parametrize("way", WAYS)
def test_that_layers_may_be_constant_and_that_an_engine_chose_stays_known(way: str) -> None:
    again = WAYS[way](favourite(constant_layers_ok=True))
    assert again.constant_layers_ok
    assert RoutedExperts.from_bytes(again.to_bytes()) == again
    for chosen in (None, False, True):
        assert WAYS[way](favourite(constant_layers_ok=True, from_engine=chosen)).from_engine is chosen
    if way in FORMS:  # no way says it by itself
        with pytest.raises(InvalidRoutes, match="layer 3: all"):
            WAYS[way](favourite())
    else:
        assert not WAYS[way](favourite()).constant_layers_ok


@pytest.mark.parametrize("way", SAME_ROWS)
def test_the_same_rows_keep_all_that_is_known_of_their_micro_batch(way: str) -> None:
    again = WAYS[way](favourite(placement=PLACEMENT)).placement
    assert (again.bad_samples, again.row_order, again.lengths) == (3, "batch", (TOKENS,))
    assert again.inputs.marks == PLACEMENT.inputs.marks  # type: ignore[union-attr]
    assert torch.equal(again.rows, torch.arange(TOKENS))


@pytest.mark.parametrize("way", ["take", "sequence", "of a sample", "concat", "layers side by side"])
def test_of_other_rows_nothing_is_known_of_a_micro_batch(way: str) -> None:
    whole = favourite(placement=PLACEMENT)
    parts = [whole.only([layer]) for layer in LAYERS]
    again = side_by_side(parts) if way == "layers side by side" else WAYS[way](whole)
    assert vars(again.placement) == vars(Placement())


@pytest.mark.parametrize("marks", [(True, False), (False, True), (False, None), (None, True), (False, False)])
def test_parts_are_together_what_each_of_them_is(marks: tuple[bool | None, ...]) -> None:
    """Constant layers are right where they are in all; who chose is as for the part that is judged most."""
    wholes = [
        favourite(constant_layers_ok=bool(mark), from_engine=mark, made_at=at)
        for at, mark in enumerate(marks)
    ]
    parts = [whole.only([layer]) for whole, layer in zip(wholes, LAYERS, strict=True)]
    chosen = True if True in marks else None if None in marks else False
    for made in (side_by_side(parts), RoutedExperts.concat(wholes)):
        assert (made.constant_layers_ok, made.from_engine, made.made_at) == (False, chosen, 0)


# In files, which tokens a micro-batch has comes along, too

IDS = token_ids(3, 6)


def recorded() -> RoutedExperts:
    with torch.no_grad(), npu_replay.record(TokenModel("batch")) as recording:
        recording.chunks[0](IDS)
    return recording.routes[0]


@pytest.mark.parametrize("form", FORMS)
def test_saved_and_loaded_tokens_that_only_the_layout_knows_are_not_counted(form: str) -> None:
    """Whatever the routes' form: without a fingerprint of their own nobody knows whose they are."""
    layout = TokenLayout.padded([6] * 3, 6, order="batch", fingerprints=map(npu_replay.fingerprint, IDS))
    rows = WAYS[form](layout.gather([recorded().take(torch.arange(6)).with_known(fingerprint=None)] * 3))
    with npu_replay.replay(TokenModel("batch"), [rows]) as session:
        session.chunks[0](IDS)
    assert session.metrics()["tokens_compared"] == 0


@pytest.mark.parametrize("form", FORMS)
def test_tokens_images_and_the_order_of_rows_are_in_them(form: str) -> None:
    """Another micro-batch's are refused by these: test_inputs.py."""
    first = recorded()
    assert WAYS[form](first).placement.inputs.described() == first.placement.inputs.described()
    digests = {"pixel_values": (torch.Size([2, 3]), 5), "grid\n": (torch.Size([]), 0)}
    known = first.with_known(
        placement=Placement(inputs=Inputs(None, (18,), (7,), digests, (3, 6)), row_order="batch")
    )
    loaded = WAYS[form](known)
    assert loaded.placement.row_order == "batch"
    assert vars(loaded.placement.inputs) == vars(known.placement.inputs)
    layout = TokenLayout.padded([6] * 3, 6)
    with pytest.raises(MicroBatchError, match="another order of rows"):
        npu_replay.collect([loaded], [layout], ParallelLayout())


def test_a_layout_with_gaps_and_sequences_out_of_order_comes_back() -> None:
    fed = torch.tensor([3, 4, -1, 5, 6, 1, 0, -1, 2])
    for places in (fed, fed[:0], fed[2:3]):
        read = Inputs.read(json.loads(json.dumps(Inputs(places, (3, 4), (None, 2**64 - 1)).described())))
        assert torch.equal(read.fed, places)
        assert (read.lengths, read.marks) == ((3, 4), (None, 2**64 - 1))
