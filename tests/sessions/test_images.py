"""The same tokens about other images, videos or sounds are other samples, on a real Qwen3-VL-MoE."""

from __future__ import annotations

import itertools
import logging
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import MicroBatchError, ReplayError, RoutedExperts, fingerprint
from npu_replay.following.fed_sequences import fed_sequences
from zoo.qwen_vl import EXPERTS, LAYERS, TOPK, Sample, call, make, sample

pytest.importorskip("transformers", minversion="5")

from sessions.test_follow import move

Call = dict[str, Any]


def recorded(model: Any, *calls: Call) -> list[RoutedExperts]:
    with torch.no_grad(), npu_replay.record(model) as recording:
        for arguments in calls:
            model(**arguments)
    return recording.routes


def replayed(model: Any, routes: list[RoutedExperts], *calls: Call) -> dict[str, float]:
    with npu_replay.replay(model, routes) as session:
        for arguments in calls:
            model(**arguments).logits.sum().backward()
    return session.metrics()


# An inner module


def test_a_block_on_an_inner_module_says_that_no_tokens_were_compared(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make()
    first = call(sample(1))
    routes = recorded(model, first)
    with caplog.at_level(logging.WARNING), npu_replay.replay(model.model.language_model, routes) as session:
        model(**first)
    assert session.metrics()["tokens_compared"] == 0
    (message,) = caplog.messages
    assert "Open the block on the one that is" in message
    caplog.clear()
    model.model.language_model.pre_process = False  # as Megatron's later pipeline stages have it
    with npu_replay.replay(model.model.language_model, routes):
        model(**first)
    assert replayed(model, routes, first)["tokens_compared"] == 1
    assert not caplog.messages


# follow


def chosen(model: Any) -> list[torch.Tensor]:
    """What the last layer's router puts out in each call from now on, sorted."""
    calls: list[torch.Tensor] = []

    def note(gate: Any, args: Any, out: Any) -> None:
        calls.append(next(part for part in out if part.dtype == torch.int64).detach().sort(1).values)

    model.model.language_model.layers[LAYERS - 1].mlp.gate.register_forward_hook(note)
    return calls


TOGETHER = {
    "one by one": lambda a, b, c: [(a,), (b,), (c,)],
    "all in one": lambda a, b, c: [(c, b, a)],
    "two and one": lambda a, b, c: [(b, c), (a,)],
}
KINDS: dict[str, tuple[Sample, Sample, Sample]] = {
    "images": (sample(1), sample(2), sample(3)),
    "with a text": (sample(1), sample(), sample(2)),
    "one has two images": (sample(1), sample(2, 1), sample(1, 2)),
    "videos": (sample(1, video=True), sample(2, video=True), sample(3, video=True)),
    "images of two sizes": (sample(1, grid=(8, 4)), sample(2), sample(1, grid=(4, 8))),
}


@pytest.mark.choice
@pytest.mark.parametrize("after", TOGETHER)
@pytest.mark.parametrize("before", TOGETHER)
@pytest.mark.parametrize("what", KINDS)
def test_follow_finds_each_image_in_whatever_batch(what: str, before: str, after: str) -> None:
    model = make()
    samples = KINDS[what]
    alone = recorded(model, *(call(entry) for entry in samples))
    truth = {id(entry): routes for entry, routes in zip(samples, alone, strict=True)}
    seen = chosen(model)
    with npu_replay.follow(model) as following:
        for part in TOGETHER[before](*samples):
            with torch.no_grad():
                model(**call(*part))
        move(model)
        for part in TOGETHER[after](*samples):
            seen.clear()
            fed = call(*part, left=1)
            model(**fed).logits.sum().backward()
            rows = seen[0].view(*fed["input_ids"].shape, TOPK)
            for row, (entry, mask) in enumerate(zip(part, fed["attention_mask"].bool(), strict=True)):
                ids = truth[id(entry)].layer_ids(LAYERS - 1).long().sort(1).values
                assert torch.equal(rows[row][mask], ids)
        assert following.metrics()["held"] == following.metrics()["recorded"] == 3


AUDIO = 7
IMAGE = 8


def fed(*samples: tuple[list[int], dict[str, list[torch.Tensor]]], **special: int) -> list[int]:
    """The fingerprints of a call with these samples, packed; each input has a row a tensor of theirs."""
    names = {
        name: [tensor for _, inputs in samples for tensor in inputs.get(name, [])]
        for _, by in samples
        for name in by
    }
    ids = torch.tensor([token for tokens, _ in samples for token in tokens])
    positions = torch.cat([torch.arange(len(tokens)) for tokens, _ in samples])
    joined = {name: torch.stack(rows) for name, rows in names.items()}
    return fed_sequences({"input_ids": ids[None], "position_ids": positions[None]} | joined, special).marks


def noise(*seeds: int) -> list[torch.Tensor]:
    return [torch.randn(16, 30, generator=torch.Generator().manual_seed(seed)) for seed in seeds]


FAMILIES: dict[str, list[tuple[list[int], dict[str, list[torch.Tensor]]]]] = {
    "clips of any length (Qwen2-Audio)": [
        ([1, AUDIO, AUDIO, AUDIO, 2, AUDIO, 3], {"input_features": noise(1, 2)}),
        ([1, AUDIO, AUDIO, AUDIO, 2, AUDIO, 3], {"input_features": noise(1, 3)}),
        ([4, 5, 6], {}),
        ([AUDIO, 3], {"input_features": noise(1)}),
    ],
    "clips and images (Gemma3n)": [
        ([1, IMAGE, IMAGE, 2, AUDIO, AUDIO], {"input_features": noise(1), "pixel_values": noise(1)}),
        ([1, IMAGE, IMAGE, 2, AUDIO, AUDIO], {"input_features": noise(2), "pixel_values": noise(1)}),
        ([1, IMAGE, IMAGE, 2, AUDIO, AUDIO], {"input_features": noise(1), "pixel_values": noise(2)}),
    ],
    "images without a token between them": [
        ([1, *[IMAGE] * 8, 2], {"pixel_values": noise(1, 2)}),
        ([1, *[IMAGE] * 8, 2], {"pixel_values": noise(2, 1)}),
        ([1, *[IMAGE] * 4, 2, 3], {"pixel_values": noise(3)}),
    ],
}


@pytest.mark.parametrize("what", FAMILIES)
def test_a_sample_has_one_fingerprint_in_whatever_call_and_no_other_sample_has_it(what: str) -> None:
    samples = FAMILIES[what]
    special = {"audio": AUDIO, "image": IMAGE}
    alone = [fed(entry, **special)[0] for entry in samples]
    assert len({*alone}) == len(samples)
    for order in itertools.permutations(range(len(samples))):
        assert fed(*(samples[n] for n in order), **special) == [alone[n] for n in order]


def test_inputs_that_cannot_be_dealt_out_never_make_two_samples_one() -> None:
    """Nothing says which token stands for them: the same call is found again, and no other."""
    first_sample, other, _ = FAMILIES["clips and images (Gemma3n)"]
    first = fed(first_sample, other)
    assert first[0] != first[1]
    assert fed(first_sample, other) == first
    assert not {*fed(other, first_sample), *fed(first_sample), *fed(other)} & {*first}


def rollout(of: Sample, seed: int) -> RoutedExperts:
    ids = torch.rand(len(of[0]), LAYERS, EXPERTS, generator=torch.Generator().manual_seed(seed)).topk(TOPK)
    routes = RoutedExperts(
        ids=ids.indices, layers=range(LAYERS), num_experts=EXPERTS, fingerprint=fingerprint(of[0])
    )
    return routes


def test_rollouts_of_the_same_tokens_need_a_key_and_are_found_by_it() -> None:
    model = make()
    first_sample = sample(1)
    other = sample(2)
    seen = chosen(model)
    first = rollout(first_sample, 1)
    second = rollout(other, 2)
    with npu_replay.follow(model, mode="R3") as following:
        following.put(first)
        following.put(first)
        with pytest.raises(ReplayError, match="two samples have the same tokens"):
            following.put(second)
        following.put(first, sample_key="a")
        following.put(second, other[0], sample_key=7)
        for keys, routes in ((["a", 7], (first, second)), ([7, "a"], (second, first))):
            seen.clear()
            model(**call(first_sample, other), sample_key=keys).logits.sum().backward()
            expected = torch.cat([each.layer_ids(LAYERS - 1).long().sort(1).values for each in routes])
            assert torch.equal(seen[0], expected)
        with pytest.raises(MicroBatchError, match="no routes are known"):
            model(**call(first_sample), sample_key=["b"], use_cache=False)
        for keys in (["a"], "ab"):
            with pytest.raises(ReplayError, match="another number of sample keys"):
                model(**call(first_sample, other), sample_key=keys)
