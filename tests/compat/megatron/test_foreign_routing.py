"""What is told of a routing by its code: it replays by itself, or it only routes."""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import pytest

from npu_replay.compat.megatron import foreign_routing

RoutingReplay: Any = None


def of(function: Any, module: str) -> FunctionType:
    """The function as if a module had defined it."""
    return FunctionType(function.__code__, {"__name__": module}, closure=function.__closure__)


def over(inner: Any, asks: Any) -> Any:
    @functools.wraps(inner)
    def wrapper(self: Any, logits: Any) -> Any:
        asks(self)
        return inner(self, logits)

    return wrapper


def by_a_replay(inner: Any) -> Any:
    @functools.wraps(inner)
    def wrapper(self: Any, logits: Any) -> Any:
        own = [RoutingReplay.pop_forward() for _ in logits]
        return inner(self, own)

    return wrapper


MEGATRON = of(lambda self, logits: self.router_replay, "megatron.core.transformer.moe.router")
MINDSPEED = of(lambda self, logits: self.router_replay, "mindspeed.core.transformer.moe.router_score_reuse")
PLAIN = of(lambda self, logits: logits, "megatron_adaptor.patches.megatron.router")
BRIDGE = of(lambda self, logits: self.router_replay, "mindspeed_bridge.router")
BY_GETATTR = of(
    lambda self, logits: getattr(self, "routing_replay", logits), "transformer_engine.pytorch.router"
)


@pytest.mark.parametrize(
    ("routing", "names"),
    [
        *((known, set()) for known in (MEGATRON, MINDSPEED, PLAIN, over(MEGATRON, print))),
        (BRIDGE, {"router_replay"}),
        (BY_GETATTR, {"routing_replay"}),
        (by_a_replay(MEGATRON), {"RoutingReplay"}),
        (over(by_a_replay(MEGATRON), print), {"RoutingReplay"}),
        (functools.partialmethod(PLAIN), set()),
    ],
)
def test_a_routing_is_known_by_the_replays_that_its_code_names(routing: Any, names: set[str]) -> None:
    kind = type("TopKRouter", (), {"routing": routing})
    assert foreign_routing.replays(kind) == names
    assert foreign_routing.replays(type("OwnRouter", (kind,), {})) == names
