"""Finds objects that no list has, by the garbage collector. The last resort, since it visits all objects."""

from __future__ import annotations

import gc
import itertools
import math
from typing import Any

from torch import nn


def alive(kind: Any) -> list[Any]:
    """Return every object of this kind or a subclass; not by isinstance, which asks proxies.

    An instance refers to its class, so the referrers of a few classes are found in C: 0.11 s in a process of
    ten million objects, where a loop over a list of all objects takes 0.6 s.

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
    """Return every module of this kind in the order of creation, as far as that can be told.

    A module registers its parts as it makes them. The first hook in a model tells which model is older: torch
    numbers all hooks of a process, and Megatron's linear layers get one as they are made.
    """

    modules = [one for one in alive(nn.Module) if "_modules" in vars(one)]
    held = {id(part) for one in modules for part in one._modules.values()}

    def first_hook(top: nn.Module) -> float:
        hooks = (vars(one).get(name, ()) for one in top.modules() for name in _HOOKS)
        return min(itertools.chain(*hooks), default=math.inf)

    tops = sorted((one for one in modules if id(one) not in held), key=first_hook)
    return [one for top in tops for one in top.modules() if issubclass(type(one), kind)]


def _with_subclasses(kind: type) -> set[type]:
    below: list[type] = type.__subclasses__(kind)
    return {kind}.union(*map(_with_subclasses, below))


_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
_FEW = 20
"""Each reference is compared with each class, so many classes cost more than a list of all objects."""
