"""The Megatron models of this process whose routers are to be replayed, where nobody says which they are.

A framework's functions may ask for a replay without naming a model. What is alive is asked of the garbage
collector: a list that is filled as models are built holds those that were thrown away too, and a class that
is patched to fill it loses the patch. An engine's pass names its model, and asks nothing here.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from npu_replay.compat.megatron import parallel_state
from npu_replay.compat.megatron.config_flags import asks_for_replay
from npu_replay.compat.megatron_backports import router_init
from npu_replay.compat.patching.live_objects import alive

_ROUTER_MODULE = "megatron.core.transformer.moe.router"


def routers() -> list[Any]:
    """The live TopKRouters whose config asks for replay, in the order of their making; also those of MTP."""
    if _are_of_several_models(_flagged()):
        gc.collect()  # one that was thrown away lives on in a cycle
    return _flagged()


def _are_of_several_models(found: list[Any]) -> bool:
    several = len({id(one.config) for one in found}) > 1
    return several or len({one.layer_number for one in found}) < len(found)


def _flagged() -> list[Any]:
    product: Any = sys.modules.get(_ROUTER_MODULE)
    if product is None:
        return []
    found = [one for one in alive(product.TopKRouter) if asks_for_replay(one.config)]
    return sorted(found, key=router_init.in_making)


def models() -> list[list[nn.Module]]:
    """The chunks of each live model that has such routers.

    Chunks that share a config are one model's, unless they hold the same decoder layer twice: then it was
    built twice.
    """
    return [chunks for _, chunks, _ in _grouped(routers())]


def _grouped(wanted: list[Any]) -> list[tuple[Any, list[nn.Module], set[int]]]:
    """Config, chunks and layers of each model."""
    found: list[tuple[Any, list[nn.Module], set[int]]] = []
    for chunk, here in _by_root(wanted, _parents()):
        config, labels = here[0].config, {int(one.layer_number or 0) for one in here}
        for known, chunks, taken in found:
            if known is config and not taken & labels:
                chunks.append(chunk)
                taken |= labels
                break
        else:
            found.append((config, [chunk], labels))
    return found


def _by_root(wanted: Iterable[Any], parents: dict[int, nn.Module]) -> list[tuple[nn.Module, list[Any]]]:
    """The outermost modules around these routers, each with its decoder's routers."""
    roots: dict[int, tuple[nn.Module, list[Any]]] = {}
    for router in wanted:
        line = [router]  # outwards
        while (parent := parents.get(id(line[-1]))) is not None:
            line.append(parent)
        if parallel_state.is_in_mtp(_path(line)):
            continue
        if isinstance(line[-1], nn.ModuleList) and len(line) > 1:
            line.pop()  # a list around whole chunks, which nobody calls
        roots.setdefault(id(line[-1]), (line[-1], []))[1].append(router)
    return list(roots.values())


def _path(line: Sequence[nn.Module]) -> str:
    """A module's name, from outside: of the innermost of these, each of which is the next one's child."""
    names = [
        next(name for name, child in outer._modules.items() if child is inner)
        for inner, outer in pairwise(line)
    ]
    return ".".join(reversed(names))


def _parents() -> dict[int, nn.Module]:
    """The module that holds each module, by the id of the latter."""
    return {
        id(child): one
        for one in alive(nn.Module)
        for child in one.__dict__.get("_modules", {}).values()
        if child is not None
    }
