"""TokenLayout.of_batch reads from a call which row has which token, on a real Qwen3-MoE."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import MicroBatchError, ParallelLayout, RoutedExperts, TokenLayout, fingerprint

pytest.importorskip("transformers")

from sessions.test_follow import EXPERTS, LAYERS, LAYOUTS, TOPK, Seen, model, packed, padded, texts


def call_of(fed: dict[str, Any], mask: bool = False) -> dict[str, Any]:
    """The arguments of of_batch for a call; with a mask where the end of a packed row is padding."""
    call = dict(fed)
    if "cu_seq_lens_q" in call:
        call["cu_seqlens"] = call.pop("cu_seq_lens_q")
    if mask:
        call["attention_mask"] = torch.arange(call["input_ids"].shape[1])[None] < 35
    return call


@pytest.mark.parametrize("form", ["tensors", "arrays", "flat"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_routes_of_a_rollout_land_on_the_rows_of_their_tokens(layout: str, form: str) -> None:
    sequences = texts()
    fed, places = LAYOUTS[layout](sequences)
    sequences = sequences[: len(places)]
    routes = [
        RoutedExperts(
            ids=torch.rand(len(sequence), LAYERS, EXPERTS).topk(TOPK).indices,
            layers=range(LAYERS),
            num_experts=EXPERTS,
            fingerprint=fingerprint(sequence),
        )
        for sequence in sequences
    ]
    call = call_of(fed, mask="padded end" in layout)
    if form == "flat" and len(fed["input_ids"]) == 1:
        call = {name: tensor.reshape(-1) for name, tensor in call.items()}
    if form == "arrays":
        call = {name: tensor.numpy() for name, tensor in call.items()}
    made = TokenLayout.of_batch(**call)
    assert made.lengths == tuple(map(len, sequences))
    assert made.fingerprints == tuple(map(fingerprint, sequences))
    called = model()
    seen = Seen(called)
    with torch.no_grad(), npu_replay.replay(called, [made.gather(routes)]) as session:
        called(**fed)
    assert session.metrics()["tokens_compared"] == 1
    for routed, shown in zip(routes, seen.of(places), strict=True):
        assert torch.equal(torch.stack(shown, 1), routed.ids.long().sort(-1).values)
    if len(sequences) > 1:
        with pytest.raises(MicroBatchError, match=r"other tokens|another number of tokens"):
            made.gather([*routes[1:], routes[0]])


def padded_call(**changes: Any) -> dict[str, Any]:
    return call_of(padded(texts(), left=3, positions=True)[0]) | changes


def packed_call(end: int = 0, bounds: bool = False, **changes: Any) -> dict[str, Any]:
    return call_of(packed(texts(), end=end, bounds=bounds)[0]) | changes


HOLED = padded_call()["attention_mask"].index_put((torch.tensor(4), torch.tensor(7)), torch.tensor(0))


NESTED = torch.nested.nested_tensor([torch.arange(3), torch.arange(5)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            padded_call(attention_mask=HOLED, position_ids=None),
            "attention_mask has holes.* one run of ones.* 2 in row 4",
        ),
        (
            padded_call(position_ids=torch.arange(14).expand(5, 14)),
            "position_ids are of a part of a sequence.* positions that count padding",
        ),
        (
            padded_call(position_ids=torch.arange(13).expand(5, 13)),
            r"position_ids have another shape.* \[5, 14\], got \[5, 13\]",
        ),
        (packed_call(end=5), "may be padding.* row 0: id 0 from place 39.* attention_mask= with 0 there"),
        (
            packed_call(end=5, bounds=True),
            "cu_seqlens don't add up to the tokens.* 40 at the end, got 35.* an attention_mask shows",
        ),
        (packed_call(cu_seqlens=[0, 3, 8, 24]), "cu_seqlens don't add up.* 35 at the end, got 24"),
        (packed_call(cu_seqlens=[0, 6, 70]), "cu_seqlens don't add up.* 35 at the end, got 70"),
        (
            packed_call(cu_seqlens=[3, 5, 7]),
            r"no cumulative lengths.* got \[3, 5, 7\].* lengths in their place",
        ),
        (
            packed_call(cu_seqlens=[0, 35]),
            r"tell different sequences.* \[\(0, 35\)\], got \[\(0, 3\), \(3, 8\)",
        ),
        (packed_call(input_ids=torch.rand(1, 35)), "aren't the token ids of a batch.* whole numbers"),
        ({"input_ids": NESTED}, r"aren't the token ids of a batch.* got NestedTensor of torch.int64, \[2"),
        (
            packed_call(parallel=ParallelLayout(cp=2)),
            r"a part of each sequence.*TokenLayout\.padded and \.packed",
        ),
    ],
)
def test_what_does_not_tell_the_sequences_is_refused(call: dict[str, Any], message: str) -> None:
    with pytest.raises(MicroBatchError, match=f"(?s)TokenLayout.of_batch: .*{message}"):
        TokenLayout.of_batch(**call)


def test_rows_of_megatron_are_sequence_major() -> None:
    (fed, _) = padded(texts(), right=1)
    sequences = texts()
    layouts = {order: TokenLayout.of_batch(**fed, order=order) for order in ("batch", "sequence")}
    width = fed["input_ids"].shape[1]
    assert torch.equal(layouts["batch"].rows.view(5, width).T.flatten(), layouts["sequence"].rows)
    lengths = list(map(len, sequences))
    assert torch.equal(layouts["sequence"].rows, TokenLayout.padded(lengths, width).rows)


AXES = torch.tensor([[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]])[:, None]
"""M-RoPE's positions of a text with an image of four tokens, [3, batch, sequence]."""


def test_positions_of_an_image_do_not_split_its_sequence() -> None:
    ids = torch.arange(1, 8)[None]
    layout = TokenLayout.of_batch(ids, torch.ones_like(ids), position_ids=AXES)
    assert layout.lengths == (7,)
    text = torch.arange(7).expand(3, 1, 7)
    assert TokenLayout.of_batch(ids, position_ids=text).lengths == (7,)
    with pytest.raises(MicroBatchError, match=r"don't tell where sequences begin.*attention_mask.*M-RoPE"):
        TokenLayout.of_batch(ids, position_ids=AXES)
    packed = torch.cat([AXES, AXES], dim=2)
    both = torch.cat([ids, ids], dim=1)
    assert TokenLayout.of_batch(both, position_ids=packed, cu_seqlens=[0, 7, 14]).lengths == (7, 7)
    with pytest.raises(MicroBatchError, match=r"tell different sequences.*\[0, 7\]"):
        TokenLayout.of_batch(both, torch.ones_like(both), position_ids=packed)


def test_a_batch_of_padding_alone_says_what_stands_for_its_routes() -> None:
    ids = torch.zeros(2, 3, dtype=torch.int64)
    layout = TokenLayout.of_batch(ids, torch.zeros_like(ids))
    with pytest.raises(
        MicroBatchError, match=r"padding alone.*RoutedExperts\.unrecorded\(len\(layout\.rows\)"
    ):
        layout.gather([], on_bad_route="native")
