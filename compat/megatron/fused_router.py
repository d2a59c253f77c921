"""The fused router (`moe_router_fusion`, Megatron-core 0.14 on): one kernel of Transformer Engine, no top-k.

Upstream's own replay never hears of it: it neither records nor replays, and says nothing. Here a call that
keeps the router's choice takes it down from the map that the kernel returned; a call that is given its
experts goes the unfused way, through the same function of Megatron's without `fused`. The kernel is a name
in `moe_utils`, replaced as long as somebody holds it; what takes its place asks the call of its thread.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

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
        global _replaced
        module: Any = sys.modules.get(MODULE)
        with _lock:
            _held.append(self)
            native = getattr(module, KERNEL, None)
            if _replaced is None and native is not None:  # None: no Transformer Engine; Megatron says so
                _replaced = native, _answered(module, native)
                setattr(module, KERNEL, _replaced[1])

    def remove(self) -> None:
        """Hold it no more; the last one gives the kernel back, unless somebody has replaced it since."""
        global _replaced
        module: Any = sys.modules.get(MODULE)
        with _lock:
            if self not in _held:
                return
            _held.remove(self)
            if _held or _replaced is None:
                return
            native, ours = _replaced
            if getattr(module, KERNEL, None) is ours:
                setattr(module, KERNEL, native)
            _replaced = None


_lock = threading.Lock()
_held: list[HeldKernel] = []
_replaced: tuple[Callable[..., Any], Callable[..., Any]] | None = None
"""The kernel, and what is in its place."""


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
