"""Routes of a micro-batch that were saved still know which tokens they belong to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import (
    MicroBatchError,
    ParallelLayout,
    RoutedExperts,
    TokenLayout,
    fingerprint,
)
from npu_replay.routes import encoding
from npu_replay.routes.inputs import Inputs
from npu_replay.routes.routed_experts import Placement
from routes.test_encoding import FORMS, Form
from zoo.toys import TokenModel, token_ids

pytestmark = pytest.mark.usefixtures("toy_routers")

IDS = token_ids(3, 6)


@pytest.fixture(params=FORMS)
def again(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[RoutedExperts], RoutedExperts]:
    form: Form = FORMS[request.param]
    numbers = iter(range(99))

    def written_and_read(routes: RoutedExperts) -> RoutedExperts:
        place = tmp_path / str(next(numbers))
        form.write(routes, place)
        return form.read(place)

    return written_and_read


def recorded() -> RoutedExperts:
    with torch.no_grad(), npu_replay.record(TokenModel("batch")) as recording:
        recording.chunks[0](IDS)
    return recording.routes[0]


def test_saved_and_loaded_tokens_that_only_the_layout_knows_are_not_counted(again: Any) -> None:
    """Whatever the routes' form: without a fingerprint of their own nobody knows whose they are."""
    layout = TokenLayout.padded([6] * 3, 6, order="batch", fingerprints=map(fingerprint, IDS))
    one = recorded().take(torch.arange(6))
    rows = again(layout.gather([one.with_known(fingerprint=None)] * 3))
    with npu_replay.replay(TokenModel("batch"), [rows]) as session:
        session.chunks[0](IDS)
    assert session.metrics()["tokens_compared"] == 0


def test_tokens_images_and_the_order_of_rows_are_in_them(again: Any) -> None:
    """Another micro-batch's are refused by these: test_inputs.py."""
    first = recorded()
    assert again(first).placement.inputs.described() == first.placement.inputs.described()
    digests = {"pixel_values": (torch.Size([2, 3]), 5), "grid\n": (torch.Size([]), 0)}
    known = first.with_known(
        placement=Placement(inputs=Inputs(None, (18,), (7,), digests, (3, 6)), row_order="batch")
    )
    loaded = again(known)
    assert loaded.placement.row_order == "batch"
    assert vars(loaded.placement.inputs) == vars(known.placement.inputs)
    layout = TokenLayout.padded([6] * 3, 6)
    with pytest.raises(MicroBatchError, match="another order of rows"):
        npu_replay.collect([loaded], [layout], ParallelLayout())


def test_a_layout_with_gaps_and_sequences_out_of_order_comes_back() -> None:
    fed = torch.tensor([3, 4, -1, 0, 1, 2, -1, 6, 5])
    for places in (fed, fed[:0], fed[2:3]):
        inputs = Inputs(places, (3, 4), (None, 2**64 - 1))
        read = Inputs.read(json.loads(json.dumps(inputs.described())))
        assert torch.equal(read.fed, places)
        assert (read.lengths, read.marks) == ((3, 4), (None, 2**64 - 1))


def test_what_knows_no_micro_batch_is_written_as_before() -> None:
    routes = recorded()
    bare = routes.sequence(0, len(routes))
    assert b"micro_batch" not in bare.to_bytes()
    assert encoding.FORMAT.encode() in bare.to_bytes()
    assert encoding.WITH_MICRO_BATCH.encode() in routes.to_bytes()
