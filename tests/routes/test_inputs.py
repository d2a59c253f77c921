"""Routes of another micro-batch, or in other rows than the tokens, are an error. A router can't tell them.

Which inputs identify a sample beside its tokens, and their digest.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import npu_replay
from npu_replay import RoutedExperts, TokenLayout, fingerprint
from npu_replay.errors import MicroBatchError, RouterError
from npu_replay.routes import host_copies, input_check
from npu_replay.routes.host_copies import HostCopy
from npu_replay.routes.inputs import digest
from npu_replay.sessions import own_choice
from zoo.outcome import random_routes
from zoo.toys import EXPERTS, TOPK, TokenModel, ToyModel, ToyRouter, hooks, token_ids

BATCH = 3
LENGTH = 6
VOCAB = 50


pytestmark = pytest.mark.usefixtures("toy_routers")


class Embedded(TokenModel):
    """A toy model that is called with token ids [batch, sequence], and whatever else a loop hands on."""

    def __init__(self, row_order: str | None = None, *parts: nn.Module) -> None:
        routers = (ToyRouter(layer, row_order=row_order) for layer in range(2))
        super().__init__("batch", *(parts or routers))

    def forward(self, input_ids: Any = None, **_: Any) -> torch.Tensor:
        return super().forward(input_ids)


class WithPixels(Embedded):
    """As Megatron's models with images, which take these first, and the ids second."""

    def forward(self, pixels: torch.Tensor, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids)


def feed(model: nn.Module, calls: Iterable[Any]) -> None:
    """Call it with token ids, or with arguments by name."""
    for call in calls:
        model(**call) if isinstance(call, dict) else model(call)


def recorded(model: nn.Module, calls: Iterable[Any]) -> list[RoutedExperts]:
    with npu_replay.record(model) as recording:
        feed(model, calls)
    return recording.routes


def replayed(model: nn.Module, routes: Sequence[RoutedExperts], calls: Iterable[Any]) -> int:
    """Replay the routes; return how many calls were held against the tokens of theirs."""
    with npu_replay.replay(model, routes) as session:
        feed(model, calls)
    return session.metrics()["tokens_compared"]


def batches(count: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(VOCAB, (BATCH, LENGTH), generator=generator) for _ in range(count)]


def samples(lengths: list[int], seed: int = 1) -> tuple[list[torch.Tensor], list[RoutedExperts]]:
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]
    routes = random_routes(lengths, [0, 1], EXPERTS, TOPK, seed)
    marks = map(fingerprint, tokens)
    return tokens, [part.with_known(fingerprint=mark) for part, mark in zip(routes, marks, strict=True)]


def padded(tokens: list[torch.Tensor], side: str = "right") -> torch.Tensor:
    grid = torch.zeros(len(tokens), LENGTH, dtype=torch.int64)
    for row, ids in zip(grid, tokens, strict=True):
        row[slice(0, len(ids)) if side == "right" else slice(LENGTH - len(ids), None)] = ids
    return grid


# R2


class Named(Embedded):
    """Takes ids by another name, or a batch with ids in it."""

    def forward(self, batch: Any = None, tokens: Any = None) -> torch.Tensor:
        if isinstance(batch, dict):
            batch = next(iter(batch.values()))
        return super().forward(tokens if batch is None else batch)


CALLS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "positional": lambda model, ids: model(ids),
    "tokens": lambda model, ids: model(tokens=ids),
    "a dict": lambda model, ids: model({"input_ids": ids}),
    "a dict by its name": lambda model, ids: model(batch={"tokens": ids}),
}


@pytest.mark.parametrize("how", CALLS)
def test_swapped_micro_batches_of_a_record_are_an_error(how: str) -> None:
    model = Named()

    def calls(micro_batches: Sequence[torch.Tensor]) -> None:
        for ids in micro_batches:
            CALLS[how](model, ids)

    with npu_replay.record(model) as recording:
        calls(batches())
    first, second, third = batches()
    with npu_replay.replay(model, recording.routes * 2):  # epochs take the same routes again
        calls([first, second, third] * 2)
    message = r"(?s)micro-batch 1: .*other tokens.*got those of the routes of micro-batch 2.* was left out"
    with pytest.raises(MicroBatchError, match=message), npu_replay.replay(model, recording.routes):
        calls([first, third, second])
    assert hooks(model) == 0


CALLED: dict[str, tuple[dict[str, Any], bool]] = {
    "one sequence": ({"attention_mask": torch.ones(1, LENGTH)}, True),
    "its positions": ({"position_ids": torch.arange(LENGTH)[None]}, True),
    "a packed row": ({"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}, False),
    "cumulative lengths": ({"cu_seq_lens_q": torch.tensor([0, 2, 6])}, False),
    "padding": ({"attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0]])}, False),
    "a mask over pairs": ({"attention_mask": torch.ones(1, 1, LENGTH, LENGTH)}, False),
    "an image": ({"pixel_values": torch.ones(4, 8)}, False),
    "several sequences": ({"input_ids": torch.arange(2 * LENGTH).view(2, LENGTH)}, False),
}


@pytest.mark.parametrize("called", CALLED)
def test_a_record_of_one_sequence_has_its_fingerprint(called: str, tmp_path: Path) -> None:
    model = Embedded()
    (others, single) = CALLED[called]
    call = {"input_ids": torch.arange(3, 3 + LENGTH)[None]} | others
    (routes,) = recorded(model, [call])
    assert routes.fingerprint == (fingerprint(call["input_ids"][0]) if single else None)
    if single:
        with npu_replay.RouteStore.writer(tmp_path) as writer:
            writer.add(routes)
        assert npu_replay.RouteStore(tmp_path).of(call["input_ids"][0]) == routes
        grid = TokenLayout.padded([LENGTH], LENGTH + 1, order="batch")
        ids = torch.nn.functional.pad(call["input_ids"], (0, 1))
        assert replayed(model, [grid.gather([routes])], [ids]) == 1


@pytest.mark.parametrize(
    ("order", "wrong", "before"),
    [
        ([1, 0, *range(2, 8)], 0, 0),
        # 5 and 6 are not among those whose outputs are checked; the last is, before an optimizer steps
        ([0, 1, 2, 3, 4, 6, 5, 7], 5, 7),
    ],
)
def test_it_shows_in_the_forward_of_the_next_checked_micro_batch(
    order: list[int], wrong: int, before: int
) -> None:
    model = Embedded()
    routes = recorded(model, batches(8))
    done = []
    with pytest.raises(MicroBatchError, match=f"micro-batch {wrong}"), npu_replay.replay(model, routes):
        for number in order:
            model(batches(8)[number])
            done.append(number)
    assert done == order[:before]


def test_a_batch_that_is_overwritten_after_its_forward_counts_as_it_was() -> None:
    """Loaders and captured graphs write the next batch into the same memory."""
    model = Embedded()
    buffer = torch.empty(BATCH, LENGTH, dtype=torch.int64)
    routes = recorded(model, (buffer.copy_(batch) for batch in batches()))
    assert replayed(model, routes, (buffer.copy_(batch) for batch in batches())) == 3


@pytest.mark.parametrize("model", [Embedded(), Named()], ids=["arguments", "a batch"])
def test_other_padding_ids_and_labels_are_the_same_tokens(model: nn.Module) -> None:
    """What an attention mask leaves out counts for nothing."""
    batch, mask = batches()[0], torch.ones(BATCH, LENGTH, dtype=torch.int64)
    mask[0, 4:] = 0

    def call(padding: int) -> dict[str, Any]:
        fed = {"input_ids": batch.masked_fill(mask == 0, padding), "attention_mask": mask}
        return {"batch": fed} if isinstance(model, Named) else fed

    assert replayed(model, recorded(model, [call(0)]), [call(7)]) == 1


# Gathered routes


def gathered(side: str = "right", order: str = "batch") -> list[RoutedExperts]:
    laid = []
    for seed in (1, 2):
        tokens, routes = samples([6, 4, 3], seed)
        marks = [fingerprint(ids) for ids in tokens]
        grid = TokenLayout.padded([6, 4, 3], LENGTH, side=side, order=order, fingerprints=marks)
        laid.append(grid.gather(routes))
    return laid


def grids(side: str = "right") -> list[torch.Tensor]:
    """What a model is called with for these routes."""
    return [padded(samples([6, 4, 3], seed)[0], side) for seed in (1, 2)]


@pytest.mark.parametrize("side", ["right", "left"])
def test_gathered_routes_belong_to_their_tokens_and_padding(side: str) -> None:
    model = Embedded()
    routes = gathered(side)
    assert replayed(model, routes, grids(side)) == 2
    other = "left" if side == "right" else "right"
    for ids, words in (
        (grids(side)[1], "routes of micro-batch 1"),
        (grids(other)[0], "padding on another side"),
    ):
        with pytest.raises(MicroBatchError, match=rf"(?s)micro-batch 0: .*{words}"):
            replayed(model, routes, [ids])


def test_packed_sequences_are_held_against_their_tokens_too() -> None:
    model = Embedded()
    tokens, routes = samples([5, 2, 4])
    marks = [fingerprint(ids) for ids in tokens]
    packed = TokenLayout.packed([5, 2, 4], align=4, fingerprints=marks).gather(routes)
    stream = torch.cat([torch.nn.functional.pad(ids, (0, -len(ids) % 4)) for ids in tokens])[None]
    assert replayed(model, [packed], [stream]) == 1
    with pytest.raises(MicroBatchError, match="other tokens"):
        replayed(model, [packed], [stream.flip(1)])


@pytest.mark.parametrize("cut", ["the last token", "a half"])
def test_preprocessing_that_feeds_a_part_of_each_sequence_is_no_error(cut: str) -> None:
    tokens, routes = samples([6, 4])

    def fed(sequences: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([ids[:-1] if cut == "the last token" else ids[: len(ids) // 2] for ids in sequences])

    layout = TokenLayout.from_probe(fed, [6, 4], fingerprints=[fingerprint(ids) for ids in tokens])
    assert replayed(Embedded(), [layout.gather(routes)], [fed(tokens)[None]]) == 0


# Routes of one sequence, as an engine's decoder gives them


@pytest.mark.parametrize("key", [None, "an image"])
def test_one_sequence_a_call_is_held_against_the_fingerprint_of_its_routes(key: str | None) -> None:
    model = Embedded()
    (ids, others), (routes, _) = samples([6, 6])
    routes = routes.sequence(0, 6, fingerprint(ids, sample_key=key))
    assert replayed(model, [routes, routes], [ids[None], ids[None]]) == 2
    with pytest.raises(MicroBatchError, match="other tokens"):
        replayed(model, [routes], [others[None]])


# Layouts and records without fingerprints


RIGHT = (torch.arange(LENGTH) < torch.tensor([6, 4, 3])[:, None]).long()
LEFT = RIGHT.flip(1)


@pytest.mark.parametrize(
    ("side", "mask", "other"),
    [
        *(("left", LEFT, False), ("right", RIGHT, False), ("left", RIGHT, True), ("right", LEFT, True)),
        # one that leaves out more or fewer tokens says nothing
        ("right", RIGHT * (torch.arange(LENGTH) > 0), False),
        *(("right", mask, False) for mask in (torch.ones(3, LENGTH), RIGHT[:, None, None], None)),
    ],
)
def test_padding_on_another_side_is_refused_by_the_mask_of_the_call(
    side: Any, mask: torch.Tensor | None, other: bool
) -> None:
    """Routes of nobody's tokens, laid out with padding on this side, in a call with this mask."""
    bare = [sample.with_known(fingerprint=None) for sample in samples([6, 4, 3])[1]]
    routes = TokenLayout.padded([6, 4, 3], LENGTH, order="batch", side=side).gather(bare)
    words = r"micro-batch 0: the layout pads .* another side.*row 1 from"
    expected: Any = pytest.raises(MicroBatchError, match=words) if other else contextlib.nullcontext()
    with expected:
        assert replayed(Embedded(), [routes], [{"input_ids": batches()[0], "attention_mask": mask}]) == 0


@pytest.mark.parametrize("named", [0, 2, 3])
def test_only_routes_that_all_have_a_fingerprint_count_as_compared(
    named: int, caplog: pytest.LogCaptureFixture
) -> None:
    input_check._warned.clear()
    tokens, routes = samples([LENGTH] * 3)
    rows = [sample if n < named else sample.with_known(fingerprint=None) for n, sample in enumerate(routes)]
    layout = TokenLayout.of_batch(padded(tokens), order="batch")
    assert replayed(Embedded(), [layout.gather(rows)], [padded(tokens)]) == (named == 3)
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
        replayed(model, recording.routes, [call])
    assert caplog.text.count("nothing holds these routes") == 1


# The order of rows


@pytest.mark.parametrize(("laid", "model"), [("sequence", "batch"), ("batch", "sequence")])
def test_rows_in_another_order_than_the_models_are_refused_on_entering(laid: str, model: str) -> None:
    routes = gathered(order=laid)
    message = rf"layer 0.*another order.*order='{model}', got order='{laid}'"
    with pytest.raises(RouterError, match=message), npu_replay.replay(Embedded(model), routes):
        pass
    assert replayed(Embedded(laid), routes, grids()) == 2


# Fingerprints that nobody asks for


@pytest.mark.parametrize("changed", [None, 0, 1, 2])
def test_an_engines_routes_know_their_tokens_where_the_layout_knows_none(changed: int | None) -> None:
    """The last token has no row, or an empty one. Rows without a gap may lack a token that isn't fed."""
    tokens, routes = samples([6, 4, 3])
    marks = [sample.fingerprint for sample in routes]
    ended = [routes[0].take([*range(5), -1]), routes[1].take(range(3)), routes[2].take([0, 1, -1])]
    ended = [sample.sequence(0, len(sample), mark) for sample, mark in zip(ended, marks, strict=True)]
    model = Embedded()
    layout = TokenLayout.padded([6, 4, 3], LENGTH, order="batch")
    cut = [
        sample.sequence(0, len(sample), fingerprint([*of, 7]))
        for sample, of in zip(routes, tokens, strict=True)
    ]
    replayed(model, [layout.gather(cut)], [padded(tokens)])
    if changed is None:
        assert replayed(model, [layout.gather(ended)], [padded(tokens)]) == 1
    else:
        tokens[changed] = tokens[changed].flip(0)
        with pytest.raises(MicroBatchError, match="other tokens"):
            replayed(model, [layout.gather(ended)], [padded(tokens)])


def test_too_few_rows_of_an_engine_to_be_judged_are_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens are compared, and whether the rows lie in their places is not."""
    monkeypatch.setattr(own_choice, "_warned_of_few_rows", [])
    tokens, routes = samples([6, 4, 3])
    marks = [sample.fingerprint for sample in routes]
    batch = TokenLayout.padded([6, 4, 3], LENGTH, order="batch", fingerprints=marks).gather(routes)
    for chosen in (False, True, True):
        replayed(Embedded(), [batch.with_known(from_engine=chosen)], [padded(tokens)])
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "the block had 13 rows, and below 64" in warning


# What identifies a sample beside its tokens


IDS = torch.arange(10).view(2, 5)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


IDENTIFY: dict[str, Callable[[int], dict[str, Any]]] = {
    "Qwen-VL's patches": lambda seed: {"pixel_values": noise(32, 96, seed=seed)},
    "a grid": lambda seed: {"image_grid_thw": torch.tensor([[1, 4 + seed, 4]])},
    "Qwen2-Audio's features": lambda seed: {"input_features": noise(3, 16, 30, seed=seed)},
    "a name that nobody knows": lambda seed: {"point_cloud": noise(70, 3, seed=seed)},
    "a row a sample": lambda seed: {"touch": noise(2, 64, seed=seed)},
    "a list of lists": lambda seed: {
        "images": [[noise(3, 4, 4)], [noise(3, 4, 4), noise(3, 8, 4, seed=seed)]]
    },
    "a dict": lambda seed: {"multi_modal_inputs": {"pixel_values": noise(8, 6, seed=seed)}},
    "a jagged tensor": lambda seed: {
        "pixel_values": torch.nested.nested_tensor([noise(2, 6), noise(3, 6, seed=seed)], layout=torch.jagged)
    },
    "fp8": lambda seed: {"pixel_values": noise(32, 96, seed=seed).to(torch.float8_e4m3fn)},
    "complex numbers": lambda seed: {
        "audio_spectrum": torch.polar(noise(9, 9).abs(), noise(9, 9, seed=seed))
    },
    "nothing and something": lambda seed: {"pixel_values": noise(4 * (seed % 2), 6)},
}
DONT: dict[str, Callable[[int], dict[str, Any]]] = {
    "a float mask": lambda seed: {"attention_mask": torch.rand(2, 1, 5, 5) + seed},
    "float positions": lambda seed: {"position_ids": torch.full((3, 2, 5), 0.5 + seed)},
    "a rotary table": lambda seed: {"position_embeddings": (noise(1, 9, 8, seed=seed), noise(1, 9, 8))},
    "dropout seeds": lambda seed: {
        "dropout_seeds": noise(4, 2, seed=seed),
        "temperature": noise(1, seed=seed),
    },
    "labels and advantages": lambda seed: {
        "labels": torch.full((2, 5), seed),
        "advantages": noise(2, 4, seed=seed),
    },
    "a figure a token but the first": lambda seed: {"ratio": noise(2, 4, seed=seed)},
    "a response's figures": lambda seed: {
        name: noise(2, 3, seed=seed)
        for name in ("returns", "old_values", "kl", "entropy", "scores", "advantages")
    },
    "a figure a sample": lambda seed: {"scale": noise(2, 1, seed=seed)},
    "embeddings, of weights": lambda seed: {"inputs_embeds": noise(7, 2, 8, seed=seed)},
    "nothing": lambda seed: {"pixel_values": None, "images": []},
}


@pytest.mark.parametrize("what", IDENTIFY)
def test_what_identifies_a_sample_is_held_against_its_routes(what: str) -> None:
    """Also where a call lacks it."""
    model = Embedded()
    calls = [IDENTIFY[what](seed) | {"input_ids": IDS} for seed in (1, 2)]
    routes = recorded(model, calls)
    assert replayed(model, routes, calls) == 2
    name = next(iter(calls[1]))
    with pytest.raises(MicroBatchError, match=f"other {name}.*micro-batch 1"):
        replayed(model, routes, reversed(calls))
    with pytest.raises(MicroBatchError, match=f"micro-batch [01]: .*other {name}"):
        replayed(model, routes, [{"input_ids": IDS}] * 2)


@pytest.mark.parametrize("what", DONT)
def test_what_does_not_identify_a_sample_may_differ_and_be_left_out(what: str) -> None:
    model = Embedded()
    routes = recorded(model, [DONT[what](1) | {"input_ids": IDS}])
    for others in (DONT[what](2), {}):
        assert replayed(model, routes, [others | {"input_ids": IDS}]) == 1


def test_the_inputs_of_a_list_of_chunks_are_those_of_its_first() -> None:
    chunks = [WithPixels(None, ToyRouter(0)), ToyModel(ToyRouter(1))]

    def run(*seeds: int) -> None:
        for seed in seeds:
            chunks[1](chunks[0](noise(3, 8, 8, seed=seed), IDS))

    with npu_replay.record(chunks) as recording:
        run(1, 2)
    with npu_replay.replay(chunks, recording.routes) as session:
        run(1, 2)
    assert session.metrics()["tokens_compared"] == 2
    with pytest.raises(MicroBatchError, match="other pixels"), npu_replay.replay(chunks, recording.routes):
        run(2, 1)


# Copies


def test_a_copy_is_there_when_every_device_has_sent_its_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices write after the host has asked for it; until then the room holds what was there before."""
    room = torch.zeros(2)
    passed = [True, False]
    event = lambda device: SimpleNamespace(  # noqa: E731
        record=bool, query=lambda: passed[device], synchronize=lambda: room[device].fill_(1)
    )
    monkeypatch.setattr(torch, "Event", event)
    monkeypatch.setattr(host_copies, "_sent", lambda tensor: room[tensor.device])
    copy = HostCopy([SimpleNamespace(device=device, is_cpu=False) for device in range(2)])
    assert not copy.has_come()
    passed[1] = True
    assert copy.has_come()
    assert copy.read() == [1, 1]


# The digest


def test_the_digest_is_pinned() -> None:
    """Routes are pickled on one node and replayed on another; a device computes the same."""
    assert int(digest(torch.arange(-3.0, 3))) == int(digest(torch.arange(-3.0, 3).double()))
    assert int(digest(torch.arange(4))) == 8252061437
    assert int(digest(torch.arange(4.0).bfloat16())) == 74002465773312
    assert int(digest(torch.empty(0, 7))) == 0
    assert int(digest(torch.arange(2**18))) == 1841630568309627756, "odd steps meet all columns"


def test_numbers_that_are_not_finite_have_a_digest() -> None:
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    assert int(digest(odd)) == int(digest(odd.bfloat16())) == int(digest(odd.half()))
    assert len({int(digest(odd[:n])) for n in range(1, 4)}) == 3
    another = torch.tensor([-0x3FFFFF], dtype=torch.int32).view(torch.float32)
    assert another.isnan()
    assert int(digest(another)) == int(digest(odd[:1])), "its bits are the device's choice"


@pytest.mark.parametrize("changed", [(200, 700), (0, 0), (8191, 1535)])
def test_a_small_part_of_a_large_input_counts(changed: tuple[int, int]) -> None:
    """12 million elements, of which every 193rd is read: an object of 32 by 32 pixels, in its patches."""
    pixels = torch.zeros(8192, 1536, dtype=torch.bfloat16)
    before = int(digest(pixels))
    row, column = changed
    pixels[max(0, row - 3) : row + 4, max(0, column - 255) : column + 256] = 1
    assert int(digest(pixels)) != before
