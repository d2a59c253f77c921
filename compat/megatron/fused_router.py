"""The fused router (`moe_router_fusion`, Megatron-core 0.14 on): one kernel of Transformer Engine, no top-k.

Upstream's own replay never hears of it: it neither records nor replays, and says nothing. Here a call that
keeps the router's choice takes it down from the map that the kernel returned; a call that is given its
experts goes the unfused way, through the same function of Megatron's without `fused`.

Asks:     the router's config, and the call that is armed in the thread.
Changes:  the kernel's name in `moe_utils`, as long as somebody holds it (`HeldKernel`).
Undone:   when the last one is removed.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from npu_replay.compat.patching.patches import Patches
from npu_replay.errors import NoEffect
from npu_replay.sessions import seam

MODULE = "megatron.core.transformer.moe.moe_utils"
KERNEL = "fused_topk_with_score_function"
_UNFUSED = "topk_routing_with_score_function"


def is_on(config: Any) -> bool:
    """Does this config's router run fused?"""
    return bool(getattr(config, "moe_router_fusion", False))


class HeldKernel:
    """While one of these is held, the kernel asks the router's call that it runs in."""

    def __init__(self) -> None:
        module: Any = sys.modules.get(MODULE)
        with _lock:
            native = getattr(module, KERNEL, None)
            if native is not None:  # else there is no Transformer Engine, and Megatron says so
                _kernel.set(module, KERNEL, _answered(module, native), "it asks a block, or RouterReplay")
            _held.append(self)

    def remove(self) -> None:
        """Hold it no more; the last one gives the kernel back, unless somebody has replaced it since."""
        with _lock:
            if self in _held:
                _held.remove(self)
            if not _held:
                _kernel.undo()


_lock = threading.Lock()
_held: list[HeldKernel] = []
_kernel = Patches("replay of the fused router")


def _answered(module: Any, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def fused(*args: Any, **kwargs: Any) -> Any:
        call = seam.armed()
        if call is None:
            return native(*args, **kwargs)
        if call.given:
            # Both take the same arguments, in the same order.
            return getattr(module, _UNFUSED)(*args, **kwargs, fused=False)
        output = native(*args, **kwargs)
        seam.arm(None)  # what reads the output is not the router's doing any more
        call.note(_ids(output, call))
        return output

    return fused


def _ids(output: Any, call: seam.Call) -> torch.Tensor:
    """The experts in a map [rows, experts], ascending: int64 [rows, topk]."""
    routing_map = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    if not isinstance(routing_map, torch.Tensor) or routing_map.shape != (call.rows, call.num_experts):
        raise NoEffect(
            "the fused router's output can't be read",
            expected=f"(probs, routing_map), the map of shape {[call.rows, call.num_experts]}",
            got=type(output) if routing_map is None else getattr(routing_map, "shape", type(routing_map)),
            cause="another Transformer Engine than is known; set moe_router_fusion=False",
        )
    # A top-k over the map, and not its nonzero(): that would wait for the device.
    ids = routing_map.detach().to(torch.float32).topk(call.topk, dim=1).indices
    return ids.sort(dim=1).values
