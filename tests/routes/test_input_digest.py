"""Which inputs identify a sample beside its tokens, and their digest; arguments of many families' models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import npu_replay
from npu_replay import MicroBatchError
from npu_replay.routes.inputs import digest
from zoo.toys import HIDDEN, ToyModel, ToyRouter

BATCH = 2
LENGTH = 5
IDS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)


pytestmark = pytest.mark.usefixtures("toy_routers")


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class AnyModel(nn.Module):
    """Takes whatever keywords a loop hands on; the first may come without a name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = ToyModel()

    def forward(self, pixels: Any = None, input_ids: Any = None, **inputs: Any) -> torch.Tensor:
        return self.inner(noise(input_ids.numel(), HIDDEN))


IDENTIFY: dict[str, Callable[[int], dict[str, Any]]] = {
    "Qwen-VL's patches": lambda seed: {"pixel_values": noise(32, 96, seed=seed)},
    "a grid": lambda seed: {"image_grid_thw": torch.tensor([[1, 4 + seed, 4]])},
    "Qwen2-Audio's features": lambda seed: {"input_features": noise(3, 16, 30, seed=seed)},
    "a name that nobody knows": lambda seed: {"point_cloud": noise(70, 3, seed=seed)},
    "a row a sample": lambda seed: {"touch": noise(BATCH, 64, seed=seed)},
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
    "a float mask": lambda seed: {"attention_mask": torch.rand(BATCH, 1, LENGTH, LENGTH) + seed},
    "float positions": lambda seed: {"position_ids": torch.full((3, BATCH, LENGTH), 0.5 + seed)},
    "a rotary table": lambda seed: {"position_embeddings": (noise(1, 9, 8, seed=seed), noise(1, 9, 8))},
    "dropout seeds": lambda seed: {
        "dropout_seeds": noise(4, 2, seed=seed),
        "temperature": noise(1, seed=seed),
    },
    "labels and advantages": lambda seed: {
        "labels": torch.full((BATCH, LENGTH), seed),
        "advantages": noise(BATCH, LENGTH - 1, seed=seed),
    },
    "a figure a token but the first": lambda seed: {"ratio": noise(BATCH, LENGTH - 1, seed=seed)},
    "a response's figures": lambda seed: {
        name: noise(BATCH, 3, seed=seed)
        for name in ("returns", "old_values", "kl", "entropy", "scores", "advantages")
    },
    "a figure a sample": lambda seed: {"scale": noise(BATCH, 1, seed=seed)},
    "embeddings, of weights": lambda seed: {"inputs_embeds": noise(7, BATCH, 8, seed=seed)},
    "nothing": lambda seed: {"pixel_values": None, "images": []},
}


@pytest.mark.parametrize("what", IDENTIFY)
def test_what_identifies_a_sample_is_held_against_its_routes(what: str) -> None:
    model = AnyModel()
    first = IDENTIFY[what](1)
    second = IDENTIFY[what](2)
    with npu_replay.record(model) as recording:
        model(input_ids=IDS, **first), model(input_ids=IDS, **second)
    with npu_replay.replay(model, recording.routes):
        model(input_ids=IDS, **first), model(input_ids=IDS, **second)
    message = f"other {next(iter(second))[:4]}.*micro-batch 1"
    with pytest.raises(MicroBatchError, match=message), npu_replay.replay(model, recording.routes):
        model(input_ids=IDS, **second), model(input_ids=IDS, **first)


@pytest.mark.parametrize("what", DONT)
def test_what_does_not_identify_a_sample_may_differ_and_be_left_out(what: str) -> None:
    model = AnyModel()
    with npu_replay.record(model) as recording:
        model(input_ids=IDS, **DONT[what](1))
    for options in (DONT[what](2), {}):
        with npu_replay.replay(model, recording.routes):
            model(input_ids=IDS, **options)


def test_the_inputs_of_a_list_of_chunks_are_those_of_its_first() -> None:
    chunks = [AnyModel(), ToyModel(ToyRouter(1))]
    chunks[0].inner = ToyModel(ToyRouter(0))

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


def test_an_input_is_found_with_a_name_and_without() -> None:
    """Megatron's models with images take these first, and the ids second."""
    model = AnyModel()
    pixels = noise(3, 8, 8)
    with npu_replay.record(model) as recording:
        model(pixels, IDS)
    with npu_replay.replay(model, recording.routes):
        model(pixels=pixels, input_ids=IDS)
    with pytest.raises(MicroBatchError, match="other pixels"), npu_replay.replay(model, recording.routes):
        model(pixels + 1, IDS)


# The digest


def test_the_digest_is_pinned() -> None:
    """Routes are pickled on one node and replayed on another; a device computes the same."""
    assert int(digest(torch.arange(-3.0, 3))) == int(digest(torch.arange(-3.0, 3).double()))
    assert int(digest(torch.arange(4))) == 8252061437
    assert int(digest(torch.arange(4.0).bfloat16())) == 74002465773312
    assert int(digest(torch.empty(0, 7))) == 0


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
