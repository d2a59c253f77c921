"""A replay holds the places of a layout against the attention mask of the call, also without fingerprints."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import MicroBatchError, RoutedExperts, TokenLayout
from npu_replay.routes import input_check
from zoo.toys import TokenModel, token_ids

pytestmark = pytest.mark.usefixtures("toy_routers")

LENGTHS = [5, 3, 6]
LENGTH = 6


def mask(side: str) -> torch.Tensor:
    real = torch.arange(LENGTH) < torch.tensor(LENGTHS)[:, None]
    return (real if side == "right" else real.flip(1)).long()


def replayed(side: Any, given: torch.Tensor | None, ids: torch.Tensor | None = None) -> dict[str, float]:
    rows = [
        RoutedExperts(ids=torch.rand(n, 2, 16).topk(3).indices, layers=[0, 1], num_experts=16)
        for n in LENGTHS
    ]
    routes = TokenLayout.padded(LENGTHS, LENGTH, order="batch", side=side).gather(rows)
    with torch.no_grad(), npu_replay.replay(TokenModel("batch"), [routes]) as session:
        session.chunks[0](token_ids(3, LENGTH) if ids is None else ids, attention_mask=given)
    return session.metrics()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_another_side_is_refused_by_the_mask_of_the_call(side: str) -> None:
    other = {"left": "right", "right": "left"}[side]
    assert replayed(side, mask(side))["tokens_compared"] == 0
    with pytest.raises(MicroBatchError, match=r"micro-batch 0: the layout pads .* another side.*row 0 from"):
        replayed(other, mask(side))


def test_a_mask_that_leaves_out_more_or_fewer_tokens_says_nothing() -> None:
    fewer = mask("right")
    fewer[:, 0] = 0
    for given in (fewer, torch.ones(3, LENGTH), mask("right")[:, None, None], None):
        replayed("right", given)


@pytest.mark.parametrize("named", [0, 2, 3])
def test_only_routes_that_all_have_a_fingerprint_count_as_compared(
    named: int, caplog: pytest.LogCaptureFixture
) -> None:
    input_check._warned.clear()
    ids = token_ids(3, LENGTH)
    layout = TokenLayout.of_batch(ids, order="batch")
    rows = [
        RoutedExperts(
            ids=torch.rand(LENGTH, 2, 16).topk(3).indices,
            layers=[0, 1],
            num_experts=16,
            fingerprint=npu_replay.fingerprint(tokens) if number < named else None,
        )
        for number, tokens in enumerate(ids)
    ]
    with torch.no_grad(), npu_replay.replay(TokenModel("batch"), [layout.gather(rows)]) as session:
        session.chunks[0](ids)
    assert session.metrics()["tokens_compared"] == (named == 3)
    assert ("nothing holds these routes" in caplog.text) == (named < 3)


@pytest.mark.parametrize("way", ["inputs=False", "embeddings"])
def test_it_says_so_of_a_record_that_knows_no_tokens(way: str, caplog: pytest.LogCaptureFixture) -> None:
    input_check._warned.clear()
    model = TokenModel("batch")
    ids = token_ids(3, LENGTH)
    call = {"input_ids": ids} if way == "inputs=False" else {"inputs_embeds": model.embedding(ids).detach()}
    with torch.no_grad(), npu_replay.record(model, inputs=way != "inputs=False") as recording:
        model(**call)
    for _ in range(2):
        with torch.no_grad(), npu_replay.replay(model, recording.routes):
            model(**call)
    assert caplog.text.count("nothing holds these routes") == 1
