"""Megatron-core's own replay API, looked up where upstream has it, on any release.

And a training loop written against it, as from 0.16 on, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from zoo.gpt import MICRO_BATCHES, Grads, Trainer, build
from zoo.outcome import gradients

MODULE = "megatron.core.transformer.moe.router_replay"
FLAG = {"moe_enable_routing_replay": True}


def api() -> tuple[Any, Any]:
    """Megatron's RouterReplay and RouterReplayAction: upstream's file, or what takes its place."""
    module = import_module(MODULE)
    return module.RouterReplay, module.RouterReplayAction


@dataclass(frozen=True)
class UpstreamApi:
    """What a training loop imports."""

    replay: Any
    """The class RouterReplay."""
    action: Any
    """The enum RouterReplayAction."""
    topk_routing: Any
    """topk_routing_with_score_function."""

    def new(self, action: str | None = None, ids: torch.Tensor | None = None) -> Any:
        """An instance of its own, with this action and these ids as its target."""
        made = self.replay()
        if action is not None:
            made.set_router_replay_action(self.action[action])
        if ids is not None:
            made.set_target_indices(ids)
        return made


@contextmanager
def upstream_api() -> Iterator[UpstreamApi]:
    """The API with no instance before, and none left after."""
    functions = import_module("megatron.core.transformer.moe.moe_utils")
    upstream = UpstreamApi(*api(), functions.topk_routing_with_score_function)
    upstream.replay.clear_global_router_replay_instances()
    try:
        yield upstream
    finally:
        upstream.replay.clear_global_router_replay_action()
        upstream.replay.clear_global_indices()
        upstream.replay.clear_global_router_replay_instances()


# A training loop


def build_replayed(variant: dict[str, Any]) -> Trainer:
    """A model with the flag, and the only one that RouterReplay knows."""
    api()[0].clear_global_router_replay_instances()
    return build(variant | FLAG)


def record(trainer: Trainer) -> tuple[list[float], list[list[torch.Tensor]]]:
    """Losses of a forward-only pass, and the ids of each micro-batch: int64 [rows, topk] a layer."""
    replay, action = api()
    replay.set_global_router_replay_action(action.RECORD)
    losses = []
    recorded = []
    with torch.no_grad():
        for tokens in trainer.batches:
            losses.append(trainer.loss(tokens).item())
            recorded.append([ids.clone() for ids in replay.get_recorded_data()])
    replay.clear_global_router_replay_action()
    replay.clear_global_indices()
    return losses, recorded


Schedule = Callable[[Callable[[int], None], Callable[[int], None]], None]


def all_forwards_first(forward: Callable[[int], None], backward: Callable[[int], None]) -> None:
    for step in (forward, backward):
        for number in range(MICRO_BATCHES):
            step(number)


def replay(
    trainer: Trainer, targets: Sequence[list[torch.Tensor]], schedule: Schedule = all_forwards_first
) -> tuple[list[float], Grads]:
    """All micro-batches through REPLAY_FORWARD and REPLAY_BACKWARD, as upstream means them."""
    router_replay, action = api()
    trainer.model.zero_grad()
    losses: dict[int, torch.Tensor] = {}

    def forward(number: int) -> None:
        router_replay.set_replay_data(targets[number])
        router_replay.set_global_router_replay_action(action.REPLAY_FORWARD)
        losses[number] = trainer.loss(trainer.batches[number])

    def backward(number: int) -> None:
        router_replay.set_global_router_replay_action(action.REPLAY_BACKWARD)
        losses[number].backward()

    schedule(forward, backward)
    router_replay.clear_global_indices()
    router_replay.clear_global_router_replay_action()
    return [losses[number].item() for number in range(MICRO_BATCHES)], gradients(trainer.model)
