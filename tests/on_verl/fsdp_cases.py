"""What verl's own FSDP engine does with npu_replay in it, in two processes.

Each case asserts on every rank. Which token sits in which row of a router, and what it chose, is what hooks
of these tests saw (qwen_sharded.witnessed).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import npu_replay
from case_jobs import Cases, shared_folder, told
from npu_replay.compat.verl.batch_routes import keys_in
from npu_replay.compat.verl.fsdp import FsdpAdapter
from npu_replay.environment import DELIVERY
from on_verl import engine_job
from on_verl import fsdp_job as job
from on_verl.engine_cases import (
    leave,
    nothing_is_on,
    patched,
    plain_of,
    r3_batch,
    r3_batch_of,
    recorded_batch,
)
from on_verl.engine_job import LENGTHS
from on_verl.fsdp_job import Actor, Tiny, prepare
from zoo import qwen, qwen_sharded, qwen_vl
from zoo.qwen_sharded import LABELS, Call, check_told, other_routers, routers, save_model, witnessed

__all__ = ["CASES", "prepare"]
CASES = Cases()
case = CASES.named
WAYS: dict[str, dict[str, Any]] = {
    "packed": {},
    "padded": {"packed": False},
    "dynamic": {"most": 24},
    "to a length": {"engine": {"pad_to_length": True, "pad_to_length_bucket": 16}},
    "sp2": {"sp": 2},
    "sp2, dynamic": {"sp": 2, "most": 13},
    "sp2, to a length": {"sp": 2, "engine": {"pad_to_length": True, "pad_to_length_bucket": 16}},
}
"""How a batch is cut and laid out."""


@functools.cache
def _weights_in() -> str:
    return save_model(shared_folder())


def tiny_of(**settings: Any) -> Tiny:
    return Tiny(**{"folder": _weights_in()} | settings)


# What is expected


def check_calls(calls: Sequence[Call], tiny: Tiny, routes: Sequence[torch.Tensor], times: int) -> None:
    """Each token of this replica went to the experts of its samples' routes; `times` in all."""
    columns = qwen_sharded.columns_of(routes[0].shape[1])
    qwen_sharded.check(calls, job.by_token(tiny, routes), columns, times, tiny.split.ranks["dp"])


# R2 and R3


def _r2(tiny: Tiny, *, stays: bool = False) -> list[torch.Tensor]:
    """What was recorded, too."""
    actor = Actor(tiny)
    with witnessed(actor.model) as first:
        data, routes = recorded_batch(actor)
    if stays:
        assert {tuple(tensor.shape[1:]) for tensor in routes} == {(1, 5)}
        usable = FsdpAdapter.of(actor.engine).routes.usable
        routes = [usable[key].ids for key in keys_in(data.batch["routed_experts"]) if key in usable]
    assert [tuple(ids.shape) for ids in routes] == [
        (sum(LENGTHS[number]), len(LABELS), 2) for number in engine_job.mine(tiny.split)
    ]
    check_calls(first, tiny, routes, times=1)
    with other_routers(actor.model), told() as lines, witnessed(actor.model) as second:
        metrics = actor.update(data)
    check_calls(second, tiny, routes, times=2 if tiny.recompute else 1)
    check_told(lines, "R2", "100%")
    assert set(metrics["npu_replay/rows_without_route"]) == {0.0}
    assert set(metrics["npu_replay/bad_samples"]) == {0.0}
    assert metrics["npu_replay/live_mismatch"][0] > 0.5
    assert metrics["npu_replay/seconds"][0] > 0
    nothing_is_on()
    return routes


def _r3(tiny: Tiny, prepared: Callable[[Any], Any] | None = None) -> None:
    actor = Actor(tiny)
    routes = engine_job.rollout_routes(tiny)
    data = engine_job.batch(tiny, routes)
    data = prepared(data) if prepared else data
    with told() as lines:
        with witnessed(actor.model) as first:
            data.batch["old_log_probs"], none = actor.log_probs(data)
        with other_routers(actor.model), witnessed(actor.model) as second:
            metrics = actor.update(data)
    assert none is None
    check_calls(first, tiny, routes, times=1)
    check_calls(second, tiny, routes, times=2 if tiny.recompute else 1)
    alone = sum(2 * (response > 6) + 1 for _, response in LENGTHS)  # see rollout_routes
    share = alone / sum(map(sum, LENGTHS))
    check_told(lines, "R3", f"{(1 - share) * 100:.2f}%")
    assert metrics["npu_replay/rows_without_route"][0] == pytest.approx(share)
    assert metrics["npu_replay/live_mismatch"][0] > 0.5
    nothing_is_on()


for _way, _settings in WAYS.items():
    for _mode, _run in (("R2", _r2), ("R3", _r3)):
        for _recompute in (False, True):
            _name = f"{_mode}: {_way}{', recompute' if _recompute else ''}"
            CASES[_name] = lambda run=_run, settings={**_settings, "mode": _mode, "recompute": _recompute}: (
                run(tiny_of(**settings))
            )


@case("R2 by reference")
def _stays() -> None:
    """Ids stay in the rank that recorded them; the witness saw them in both passes."""
    with patched() as patch:
        patch.setenv(DELIVERY, "ray")
        _r2(tiny_of(recompute=True, **WAYS["sp2, dynamic"]), stays=True)


@case("R3 by reference")
def _by_reference() -> None:
    tiny = tiny_of(mode="R3", recompute=True, **WAYS["dynamic"])
    with engine_job.delivered(tiny) as by_reference:
        _r3(tiny, by_reference)


@case("more experts than a byte holds")
def _wide() -> None:
    """Ids come back as int16."""
    folder = save_model(shared_folder(), num_experts=300)
    routes = _r2(tiny_of(folder=folder, sp=2))
    assert {ids.dtype for ids in routes} == {torch.int16}
    assert max(int(ids.max()) for ids in routes) > 255


@case("verl's block for an NPU")
def _npu_block() -> None:
    """It stays in this process."""
    job.use_block_for_an_npu()
    _r2(tiny_of(recompute=True, **WAYS["sp2, dynamic"]))
    _r3(tiny_of(mode="R3", **WAYS["padded"]))


@case("without its adapter")
def _adapter() -> None:
    """LoRA: the reference pass is the actor's own without its adapter, and neither recorded nor replayed."""
    actor = Actor(tiny := tiny_of(lora=4))
    plain = plain_of(actor)
    for worker in (actor, plain):
        with torch.no_grad():
            for name, weight in worker.model.named_parameters():
                if "lora_B" in name:  # a fresh adapter does nothing: half of it is zero
                    weight.fill_(0.3)
    data, routes = recorded_batch(actor)
    with witnessed(actor.model) as first:
        reference, names = actor.reference(data)
    wanted, _ = plain.reference(engine_job.batch(tiny))
    assert "routed_experts" not in names
    assert torch.equal(reference, wanted)
    others = qwen_sharded.share_of_others(first, job.by_token(tiny, routes))
    assert others > 0.05, "the adapter has no effect"
    with other_routers(actor.model), witnessed(actor.model) as calls:
        actor.update(data)
    check_calls(calls, tiny, routes, times=1)
    nothing_is_on()
    # verl sets no action on FSDP, so the mark in a batch alone says whether an update is replayed
    actor.worker.enable_routing_replay = False
    update = engine_job.update_batch(data)
    engine_job.tu.assign_non_tensor_data(update, "enable_routing_replay", False)
    metrics = actor.output(actor.worker.update_actor(update))["metrics"]
    assert not [name for name in metrics if name.startswith("npu_replay/")]


# What goes wrong


@case("bad samples after the first step")
def _bad_later() -> None:
    """One is counted, once in a sequence-parallel group. A sample that the rollout gave no routes of isn't
    bad: it is left to the routers."""
    tiny = tiny_of(mode="R3", sp=2)
    actor, routes = Actor(tiny), engine_job.rollout_routes(tiny)
    routes[5] = torch.zeros_like(routes[5])

    for bad in (0, 1):
        spoiled = [ids.to(torch.int16) for ids in routes]
        for ids in spoiled[:bad]:
            ids[1, 0] = torch.tensor([engine_job.EXPERTS + 3, 1])
        with witnessed(actor.model) as calls:
            metrics = actor.update(r3_batch(tiny, spoiled))
        assert set(metrics["npu_replay/bad_samples"]) == {float(bad)}
        left = [ids if number >= bad else torch.zeros_like(ids) for number, ids in enumerate(routes)]
        check_calls(calls, tiny, left, times=1)


@case("one rank fails in a way that nobody has thought of")
def _unthought() -> None:
    """Where it lays out a micro-batch, before a forward and after one whose rows another rank waits for."""
    for settings, run in (
        ({"sp": 2}, recorded_batch),
        (
            {"mode": "R3"},
            lambda actor: actor.update(r3_batch(actor.tiny, engine_job.rollout_routes(actor.tiny))),
        ),
    ):
        actor = Actor(tiny_of(**settings))  # type: ignore[arg-type]
        with patched() as patch:
            if dist.get_rank() == 1:
                patch.setattr("npu_replay.compat.verl.fsdp.layout_of", {}.__getitem__)
            leave(partial(run, actor), "this rank can't")  # type: ignore[arg-type]
        run(actor)  # type: ignore[operator]


@case("images, which are cut after their embedding")
def _images() -> None:
    """The model is fed the whole stream then; its text model's routers see this rank's piece of it."""
    from npu_replay.compat.verl.fsdp import layout_of

    actor: Any = Actor(tiny_of(sp=2))
    actor.model.config.vision_config = {}
    data = engine_job.log_prob_batch(engine_job.batch(actor.tiny))[:3]
    data["multi_modal_inputs"] = [{"pixel_values": torch.zeros(2)}] * 3  # type: ignore[assignment]
    total = sum(map(sum, LENGTHS[:3]))
    piece = -(-total // 2)
    places = range(dist.get_rank() * piece, (dist.get_rank() + 1) * piece)
    wanted = [place if place < total else -1 for place in places]
    assert total % 2, "else no rank has padding"
    assert layout_of(actor.engine, data, {}).rows.tolist() == wanted


def vision_batch(tiny: Tiny, images: Sequence[int]) -> Any:
    """verl's batch of one question and one answer about each of these images.

    With positions of text: verl can't cut a batch with four kinds of them on torch 2.13.
    """
    import numpy as np

    samples = [qwen_vl.sample(image) for image in images]
    tokens = samples[0][0]
    data = engine_job.batch(tiny, None, [(tokens[:6], tokens[6:])] * len(LENGTHS))
    inputs = np.array([{}, *(fields for _, fields in samples)], dtype=object)[1:]
    data.non_tensor_batch["multi_modal_inputs"] = inputs
    return data


@contextmanager
def by_image(model: nn.Module) -> Iterator[dict[float, torch.Tensor]]:
    """By an image's first value, what the routers chose for its sample, [layers, tokens, topk], sorted."""
    chosen: dict[float, torch.Tensor] = {}
    fed: list[float] = []

    def fed_with(_: Any, __: Any, kwargs: Any) -> None:
        fed[:] = kwargs["pixel_values"].view(-1, 16, 96)[:, 0, 0].tolist()

    def chose(layer: int, _: Any, __: Any, output: Any) -> None:
        ids = next(tensor for tensor in output if tensor.dtype == torch.int64).detach().sort(1).values
        for image, rows in zip(fed, ids.view(len(fed), -1, qwen_vl.TOPK), strict=True):
            chosen.setdefault(image, torch.zeros(qwen_vl.LAYERS, *rows.shape, dtype=torch.int64))
            chosen[image][layer] = rows

    handles = [model.register_forward_pre_hook(fed_with, with_kwargs=True)]
    for layer, router in routers(model).items():
        handles.append(router.register_forward_hook(partial(chose, layer)))
    try:
        yield chosen
    finally:
        for handle in handles:
            handle.remove()


@case("the same question about other images")
def _other_images() -> None:
    """On verl's own batch of a Qwen3-VL-MoE: each image keeps its routes, in batches and in files."""
    from transformers.models.qwen3_vl import modeling_qwen3_vl as modeling

    # transformers has renamed a class that verl's forward of Qwen3-VL names: 5.24's name, and before
    names = ("MultimodalCausalLMOutputWithPast", "CausalLMOutputWithPast", "Qwen3VLCausalLMOutputWithPast")
    modeling.Qwen3VLCausalLMOutputWithPast = next(filter(None, (getattr(modeling, n, None) for n in names)))
    folder = shared_folder()
    files = shared_folder()
    if dist.get_rank() == 0:
        qwen_vl.make(3).save_pretrained(folder)
        qwen.tokenizer(map(str, range(200)), pad_token="0").save_pretrained(folder)
    dist.barrier()
    actor = Actor(Tiny(folder=folder, files={"record_file": files}, most=24))
    images = [number + 1 for number in engine_job.mine(actor.tiny.split)]
    data = vision_batch(actor.tiny, images)
    with by_image(actor.model) as first:
        data.batch["old_log_probs"], data.batch["routed_experts"] = actor.log_probs(data)
    assert len({tuple(ids.flatten().tolist()) for ids in first.values()}) == 4
    with other_routers(actor.model), by_image(actor.model) as second:
        metrics = actor.update(data)
    assert metrics["npu_replay/live_mismatch"][0] > 0.3
    assert first.keys() == second.keys()
    assert all(torch.equal(first[image], second[image]) for image in first)
    dist.barrier()
    assert len(npu_replay.RouteStore(files)) == 8, "of both ranks"
    other = Actor(Tiny(folder=folder, mode="R3", files={"replay_file": files}, most=12))
    data = vision_batch(other.tiny, [images[number] for number in (2, 0, 3, 1)])
    with other_routers(other.model), by_image(other.model) as third:
        other.update(r3_batch_of(data))
    assert all(torch.equal(first[image][:, :-1], third[image][:, :-1]) for image in first)
    unknown = vision_batch(other.tiny, [image + 8 for image in images])
    leave(lambda: other.update(r3_batch_of(unknown)), "no routes of these tokens", first=0)


@case("a model without experts")
def _dense() -> None:
    folder = save_model(shared_folder(), dense=True)
    actor = Actor(tiny_of(folder=folder))
    leave(partial(recorded_batch, actor), "no router", first=0)
    Actor(tiny_of(folder=folder, mode="disabled")).log_probs(engine_job.batch(actor.tiny))
