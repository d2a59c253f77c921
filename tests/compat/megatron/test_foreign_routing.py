"""What is told of a routing by its code: it replays by itself, or it only routes."""

from __future__ import annotations

import functools
from types import FunctionType
from typing import Any

import pytest

from npu_replay.compat.megatron import foreign_routing

RoutingReplay: Any = None


def upstreams(self: Any, logits: Any) -> Any:
    return logits, self.router_replay


def plain(self: Any, logits: Any) -> Any:
    """Routes as Megatron does, without any replay."""
    return logits


def of(function: Any, module: str) -> FunctionType:
    """The function as if a module had defined it."""
    return FunctionType(function.__code__, {"__name__": module}, closure=function.__closure__)


def over(inner: Any, asks: Any) -> Any:
    @functools.wraps(inner)
    def wrapper(self: Any, logits: Any) -> Any:
        asks(self)
        return inner(self, logits)

    return wrapper


def wrapped_with_a_replay(inner: Any) -> Any:
    @functools.wraps(inner)
    def wrapper(self: Any, logits: Any) -> Any:
        own = [RoutingReplay.pop_forward() for _ in logits]
        return inner(self, own)

    return wrapper


def by_getattr(self: Any, logits: Any) -> Any:
    return getattr(self, "routing_replay", logits)


MEGATRON = of(upstreams, "megatron.core.transformer.moe.router")


@pytest.mark.parametrize(
    ("routing", "names"),
    [
        (MEGATRON, set()),
        (of(upstreams, "mindspeed.core.transformer.moe.router_score_reuse"), set()),
        (of(plain, "megatron_adaptor.patches.megatron.router"), set()),
        (over(MEGATRON, print), set()),
        (of(upstreams, "mindspeed_bridge.router"), {"router_replay"}),
        (of(by_getattr, "transformer_engine.pytorch.router"), {"routing_replay"}),
        (wrapped_with_a_replay(MEGATRON), {"RoutingReplay"}),
        (over(wrapped_with_a_replay(MEGATRON), print), {"RoutingReplay"}),
        (functools.partialmethod(plain), set()),
    ],
)
def test_a_routing_is_known_by_the_replays_that_its_code_names(routing: Any, names: set[str]) -> None:
    kind = type("TopKRouter", (), {"routing": routing})
    assert foreign_routing.replays(kind) == names
    assert foreign_routing.replays(type("OwnRouter", (kind,), {})) == names
