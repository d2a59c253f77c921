"""Layers with numbers of experts of their own: real ones of Qwen3-MoE."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import npu_replay
from npu_replay import RouterError
from npu_replay.rollout.model_config import RoutedModel
from zoo import qwen
from zoo.outcome import gradients, same

UNLIKE = {
    "top-k": ([8, 8, 8], [2, 3, 2]),
    "both": ([8, 16, 4], [2, 4, 1]),
    "more than a byte holds": ([64, 384], [2, 2]),
}
PARTS = pytest.mark.parametrize(("experts", "topks"), UNLIKE.values(), ids=UNLIKE)


def uneven(experts: Sequence[int], topks: Sequence[int], **changes: Any) -> Any:
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    model = qwen.make(64, len(experts), **changes)
    for layer, number, topk in zip(model.model.layers, experts, topks, strict=True):
        own = copy.deepcopy(model.config)
        own.num_experts = number
        own.num_experts_per_tok = topk
        layer.mlp = Qwen3MoeSparseMoeBlock(own)
        for weight in layer.mlp.parameters():
            nn.init.normal_(weight, std=0.3)
    return model.train()


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 64, (2, 10), generator=torch.Generator().manual_seed(seed))


def shown_code(error: BaseException) -> str:
    (code,) = re.findall(r"`(with contextlib[^`]*)`", str(error))
    return str(code)


def routes_of(model: Any) -> Any:
    layers = range(model.config.num_hidden_layers)
    return [npu_replay.RoutedExperts.unrecorded(20, layers=layers, topk=2, num_experts=8)]


DOORS = {
    "record": npu_replay.record,
    "observe": npu_replay.observe,
    "replay": lambda model: npu_replay.replay(model, routes_of(model)),
    "follow": npu_replay.follow,
}


@PARTS
@pytest.mark.parametrize("door", DOORS)
def test_unlike_layers_are_refused_on_entering_with_the_way_that_works(
    door: str, experts: list[int], topks: list[int]
) -> None:
    model = uneven(experts, topks)
    with pytest.raises(RouterError, match="differ in top-k or experts") as caught, DOORS[door](model):
        raise AssertionError("entered")
    assert re.search(r"layer \d.*top-\d of \d+ experts, as in layer 0.*got top-\d of \d+", str(caught.value))
    assert shown_code(caught.value)
    assert not any(module._forward_hooks for module in model.modules())


@PARTS
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_shown_code_records_and_replays_a_model_of_unlike_layers(
    experts: list[int], topks: list[int], checkpointing: bool
) -> None:
    """The replay takes the ids of a model that has changed since, in the forward and in recomputes."""
    model = uneven(experts, topks)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(RouterError) as caught, npu_replay.record(model):
        pass
    names = {"contextlib": contextlib, "npu_replay": npu_replay, "model": model, "batch": batch()}
    with torch.no_grad():
        exec(shown_code(caught.value), names)
    recorded = [part.routes[0] for part in names["parts"]]
    assert [(routes.topk, routes.num_experts) for routes in recorded] == list(
        zip(topks, experts, strict=True)
    )
    routers = npu_replay.routers.find([model])[0]
    with torch.no_grad():
        for router in routers:
            nn.init.normal_(router.module.weight, std=0.3)
    with contextlib.ExitStack() as stack:
        for router, part in zip(routers, names["parts"], strict=True):
            stack.enter_context(npu_replay.replay(router.module, part.routes))
        witnesses = [stack.enter_context(npu_replay.observe(router.module)) for router in routers]
        model(batch()).logits.sum().backward()
    for seen, routes in zip(witnesses, recorded, strict=True):
        assert torch.equal(seen.shown[0].ids.long().sort().values, routes.ids.long().sort().values)


@PARTS
def test_pin_recompute_serves_unlike_layers(experts: list[int], topks: list[int]) -> None:
    """Its recompute has the experts of its forward: those that a recompute chooses while no weight moves."""
    model = uneven(experts, topks)
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model(batch()).logits.square().sum().backward()
    untouched = gradients(model)
    model.zero_grad()
    with npu_replay.pin_recompute(model) as session:
        model(batch()).logits.square().sum().backward()
    assert session.metrics()["routers"] == len(experts)
    assert same(gradients(model), untouched)


def test_a_built_model_of_unlike_layers_or_loops_is_no_routed_model() -> None:
    model = uneven([8, 4], [2, 2])
    with pytest.raises(RouterError, match="part by part"):
        RoutedModel.of_module(model, npu_replay.routers.find([model])[0])
    looped = qwen.make(64, 2)
    looped.config.num_loops = 3
    with pytest.raises(RouterError, match=r"looped model.*num_loops=3"):
        RoutedModel.of_module(looped, npu_replay.routers.find([looped])[0])
