"""Megatron-core's own replay API, looked up where upstream has it, on any release."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

MODULE = "megatron.core.transformer.moe.router_replay"
FLAG = {"moe_enable_routing_replay": True}


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

    def everywhere(self, action: str) -> None:
        self.replay.set_global_router_replay_action(self.action[action])


@contextmanager
def upstream_api() -> Iterator[UpstreamApi]:
    """The API with no instance before, and none left after."""
    module = import_module(MODULE)
    functions = import_module("megatron.core.transformer.moe.moe_utils")
    api = UpstreamApi(
        module.RouterReplay, module.RouterReplayAction, functions.topk_routing_with_score_function
    )
    api.replay.clear_global_router_replay_instances()
    try:
        yield api
    finally:
        api.replay.clear_global_router_replay_action()
        api.replay.clear_global_indices()
        api.replay.clear_global_router_replay_instances()
