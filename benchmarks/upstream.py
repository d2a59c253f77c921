"""Megatron's own API of routing replay, or what npu_replay serves in its place on 0.12 to 0.15."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import nn

from benchmarks.timing import Way
from npu_replay import RoutedExperts


def api_name() -> str | None:
    """What the API is called in tables; None where this Megatron-core has none."""
    spec = find_spec("megatron.core.transformer.moe.router_replay")
    if spec is None:
        return None
    return "Megatron's own" if spec.has_location else "its API, served"


def record_and_replay(model: nn.Module, run: Callable[[], object], routes: RoutedExperts) -> list[Way]:
    """The two ways of a model that was built with the flag; none where there is no API."""
    if (name := api_name()) is None:
        return []
    return [
        Way(f"{name}, record", run, partial(_acting, model, "RECORD", routes)),
        Way(name, run, partial(_acting, model, "REPLAY_FORWARD", routes)),
    ]


@contextlib.contextmanager
def _acting(model: nn.Module, action: str, routes: RoutedExperts) -> Iterator[None]:
    """Let the API record, or answer with `routes` in every forward."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    found = [getattr(module, "router_replay", None) for module in model.modules()]
    replays: list[Any] = [replay for replay in found if replay is not None]
    for label, replay in zip(routes.layers, replays, strict=True):
        replay.target_topk_idx = routes.layer_ids(label).long().to(next(model.parameters()).device)
        replay.set_router_replay_action(RouterReplayAction[action])
    try:
        yield
    finally:
        for replay in replays:
            replay.clear_router_replay_action()
