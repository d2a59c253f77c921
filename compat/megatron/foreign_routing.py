"""Tells by its code whether somebody has changed how a router chooses, and whether that replays by itself.

Products for accelerators wrap or retype the method and route as Megatron does: that is replayed as Megatron's
is. A framework's replay patch asks for its routes in there, and isn't asked a second time.

Asks:     the names in the code of the method, and of the wrappers around it.
Changes:  nothing.
Undone:   there is nothing to undo.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType
from typing import Any

ASKED = "router_replay"
"""The attribute that Megatron's routing asks from 0.16 on, as do replay patches that are modelled on it."""
_OWNERS = ("megatron", "mindspeed", "mindspeed_llm")
"""The packages whose routing is known: where they mention a replay, it is upstream's."""


_CHOOSING = ("gating", "routing", "forward")


def is_known(router: Any) -> bool:
    """Return whether all code of a router that makes scores and chooses is Megatron's or MindSpeed's."""
    return not any(any(_foreign(type(router), name)) for name in _CHOOSING)


def replays(kind: Any) -> frozenset[str]:
    """Return the names of replays in somebody else's code of a router class's `routing`; none in Megatron's.

    >>> from npu_replay.compat.megatron import foreign_routing
    >>> class Router:
    ...     def routing(self, logits):
    ...         return RoutingReplay.pop_forward(logits)
    >>> foreign_routing.replays(Router)
    frozenset({'RoutingReplay'})
    """
    return frozenset(
        name for code in _foreign(kind, "routing") for name in _names(code) if "replay" in name.lower()
    )


def _foreign(kind: Any, method: str) -> Iterator[CodeType]:
    """Yield the code of a method and of what it wraps, where it is neither Megatron's nor MindSpeed's."""
    # A block asks this of each router: inspect.getattr_static takes five times as long.
    function: Any = next((vars(base)[method] for base in kind.__mro__ if method in vars(base)), None)
    while function is not None:
        # Not __module__, which functools.wraps copies to a wrapper.
        package = str(getattr(function, "__globals__", {}).get("__name__", "")).partition(".")[0]
        code = getattr(function, "__code__", None)
        if code is not None and package not in _OWNERS:
            yield code
        function = getattr(function, "__wrapped__", None)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code reads, also by getattr, and those of the functions in it."""
    yield from code.co_names
    yield from code.co_freevars
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant
