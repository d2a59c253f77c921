"""The Megatron models of this process whose routers are to be replayed, where nobody says which they are.

A framework's functions may ask for a replay without naming a model. What is alive is asked of the garbage
collector: a list that is filled as models are built holds those that were thrown away too, and a class that
is patched to fill it loses the patch. An engine's pass names its model, and asks nothing here.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

from torch import nn

from npu_replay.compat.megatron.config_flags import asks_for_replay
from npu_replay.compat.megatron.parallel_state import is_in_mtp
from npu_replay.compat.megatron_backports import router_init
from npu_replay.compat.patching import live_objects

_ROUTER_MODULE = "megatron.core.transformer.moe.router"


def routers() -> list[Any]:
    """The live TopKRouters whose config asks for replay, in the order of their making; also those of MTP."""
    found = _flagged()
    if len({one.layer_number for one in found}) < len(found) or len({id(one.config) for one in found}) > 1:
        gc.collect()  # of several models one that was thrown away may live on in a cycle
        found = _flagged()
    return found


def _flagged() -> list[Any]:
    product: Any = sys.modules.get(_ROUTER_MODULE)
    if product is None:
        return []
    return [one for one in router_init.in_order(product.TopKRouter) if asks_for_replay(one.config)]


def models() -> list[list[nn.Module]]:
    """The chunks of each live model that has such routers.

    Chunks that share a config are one model's, unless they hold the same decoder layer twice: then it was
    built twice.
    """
    found: list[tuple[Any, list[nn.Module], set[int]]] = []  # config, chunks and layers of each model
    for chunk, here in _chunks(routers()):
        config, labels = here[0].config, {int(one.layer_number or 0) for one in here}
        for known, chunks, taken in found:
            if known is config and not taken & labels:
                chunks.append(chunk)
                taken |= labels
                break
        else:
            found.append((config, [chunk], labels))
    return [chunks for _, chunks, _ in found]


def _chunks(wanted: list[Any]) -> list[tuple[nn.Module, list[Any]]]:
    """The outermost modules around these routers, each with its decoder's routers; in the routers' order."""
    every = live_objects.modules()
    # A list around whole chunks is called by nobody.
    lists = {id(one) for one in live_objects.outermost(every) if isinstance(one, nn.ModuleList)}
    places = {id(router): place for place, router in enumerate(wanted)}
    found: dict[int, tuple[nn.Module, list[Any]]] = {}
    for root in live_objects.outermost([one for one in every if id(one) not in lists]):
        paths = {id(module): path for path, module in root.named_modules() if id(module) in places}
        here = sorted(places.pop(one) for one, path in paths.items() if not is_in_mtp(path))
        if here:
            found[here[0]] = root, [wanted[place] for place in here]
    return [found[place] for place in sorted(found)]
