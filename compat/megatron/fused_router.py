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


class _Held:
    """The kernel, replaced while at least one holds it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._native: Callable[..., Any] | None = None
        self._ours: Callable[..., Any] | None = None

    def hold(self) -> Handle:
        with self._lock:
            self._holders += 1
            module: Any = sys.modules.get(MODULE)
            native = getattr(module, KERNEL, None)
            if self._ours is None and native is not None:  # None: no Transformer Engine; Megatron says so
                self._native, self._ours = native, _answered(module, native)
                setattr(module, KERNEL, self._ours)
        return Handle()

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders or self._ours is None:
                return
            module: Any = sys.modules.get(MODULE)
            if getattr(module, KERNEL, None) is self._ours:
                setattr(module, KERNEL, self._native)
            self._native = self._ours = None


_held = _Held()


class Handle:
    """Gives the kernel back, once."""

    def __init__(self) -> None:
        self._holds = True

    def remove(self) -> None:
        if self._holds:
            self._holds = False
            _held.release()


def hold() -> Handle:
    """Have the kernel ask the router's call that it runs in, until the handle is removed."""
    return _held.hold()


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
        call.note(lambda: _ids(output, call), "fused")
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
