"""The Megatron models of this process whose routers are to be replayed, where nobody says which they are.

A framework's functions may ask for a replay without naming a model. What is alive is asked of the garbage
collector: a list that is filled as models are built holds those that were thrown away too, and a class that
is patched to fill it loses the patch. It takes a tenth of a second, once for each block.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from torch import nn

from npu_replay.compat.config_flags import asks_for_replay
from npu_replay.compat.live_objects import alive

_ROUTER_MODULE = "megatron.core.transformer.moe.router"


def routers() -> list[Any]:
    """The live TopKRouters whose config asks for replay, in the order of their making; also those of MTP."""
    product: Any = sys.modules.get(_ROUTER_MODULE)
    if product is None:
        return []
    return [one for one in alive(product.TopKRouter) if asks_for_replay(one.config)]


def models() -> list[list[nn.Module]]:
    """The chunks of each live model that has such routers.

    Chunks that share a config are one model's, unless they hold the same decoder layer twice: then it was
    built twice.
    """
    found = _grouped(routers())
    if len(found) > 1:
        gc.collect()  # a model that was thrown away lives on in a cycle
        found = _grouped(routers())
    return [chunks for _, chunks, _ in found]


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
        if any(outer._modules.get("mtp") is inner for inner, outer in pairwise(line)):
            continue  # multi-token prediction
        if isinstance(line[-1], nn.ModuleList) and len(line) > 1:
            line.pop()  # a list around whole chunks, which nobody calls
        roots.setdefault(id(line[-1]), (line[-1], []))[1].append(router)
    return list(roots.values())


def _parents() -> dict[int, nn.Module]:
    """The module that holds each module, by the id of the latter."""
    return {
        id(child): one
        for one in alive(nn.Module)
        for child in one.__dict__.get("_modules", {}).values()
        if child is not None
    }
