"""Objects that nobody has listed: the garbage collector knows them. The last resort, since it visits all."""

from __future__ import annotations

import gc
from typing import Any

from torch import nn


def alive(kind: Any) -> list[Any]:
    """Every object of this kind, or of a kind made from it; not by isinstance, which asks proxies.

    An instance refers to its class, so the collector finds a few classes' by their referrers, in C: 0.11 s in
    a process of ten million objects, where a list of all of them and a look at each take 0.6 s.

    >>> from npu_replay.compat.patching.live_objects import alive
    >>> class Router: ...
    >>> routers = [Router(), Router()]
    >>> len(alive(Router))
    2
    """
    if not isinstance(kind, type):
        return []  # a stand-in for a product's class has no instances
    kinds = [*_with_subclasses(kind)]
    found = gc.get_referrers(*kinds) if len(kinds) <= _FEW else gc.get_objects()
    return [one for one in found if issubclass(type(one), kind)]


def alive_in_models(kind: Any) -> list[Any]:
    """Return every module of this kind, older models first, and those of a model as `modules()` has them.

    That is the order of their making, as far as it can be told: the collector keeps older objects apart from
    younger ones, but changes their order inside a model, while it looks for garbage.
    """
    return [one for top in outermost(modules()) for one in top.modules() if issubclass(type(one), kind)]


def modules() -> list[nn.Module]:
    """Return every module, those that the collector has known for longer first."""
    objects = (one for age in (2, 1, 0) for one in gc.get_objects(generation=age))
    return [one for one in objects if issubclass(type(one), nn.Module) and "_modules" in vars(one)]


def outermost(of: list[nn.Module]) -> list[nn.Module]:
    """Return those of these modules that sit in no other one."""
    held = {id(part) for one in of for part in one._modules.values()}
    return [one for one in of if id(one) not in held]


def _with_subclasses(kind: type) -> set[type]:
    below: list[type] = type.__subclasses__(kind)
    return {kind}.union(*map(_with_subclasses, below))


_FEW = 20
"""Each reference is held against each class, so many classes cost more than a list of all objects."""
