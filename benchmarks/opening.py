"""What it costs to open a block on a large model and to close it, by one walk of all its modules."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

import npu_replay
from benchmarks.timing import Way
from npu_replay import RoutedExperts, routers
from npu_replay.smoke import megatron_model

MODEL: dict[str, Any] = {"num_layers": 64, "hidden_size": 8, "num_moe_experts": 128, "moe_router_topk": 8}
"""25,700 modules; a verl trainer opens a block on such a model for every mini-batch."""
QUICK: dict[str, Any] = {"num_layers": 8}


def ways(*, quick: bool) -> list[Way]:
    """The ways to measure: the walk, and each block without a forward, so it is left by an error."""
    model: nn.Module = megatron_model.model(megatron_model.config(**(MODEL | (QUICK if quick else {}))))
    (found,) = routers.find([model])
    chosen = {"topk": found[0].topk, "num_experts": found[0].num_experts}
    given = RoutedExperts.unrecorded(8, layers=[router.label for router in found], **chosen)
    blocks: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "record": lambda: npu_replay.record(model),
        "replay": lambda: npu_replay.replay(model, [given]),
        "pin_recompute": lambda: npu_replay.pin_recompute(model),
    }
    walk = Way("one walk of modules()", lambda: deque(model.modules(), maxlen=0))
    return [walk, *(Way(name, lambda block=block: _left(block())) for name, block in blocks.items())]


class _LeftError(Exception):
    pass


def _left(block: AbstractContextManager[Any]) -> None:
    with contextlib.suppress(_LeftError), block:
        raise _LeftError
