"""Records and replays the fused router (`moe_router_fusion`, Megatron-core 0.14 on).

It is one function of Transformer Engine, which upstream's RouterReplay neither records nor replays. Here a
call that is given its experts runs unfused, through Megatron's own function without `fused`. A call that
keeps the router's choice runs the function. NVIDIA's is a kernel that calls no top-k: the choice is read from
the map that it returns. TransformerEngineNPU's is made of small operators, with a top-k that the armed call
answers as it does an unfused router's.

Asks:     the router's config, and the call that is armed in the thread.
Changes:  the kernel's name in `moe_utils`, as long as somebody holds it (`HeldKernel`).
Undone:   when the last one is removed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from npu_replay.compat.patching.patches import Patches
from npu_replay.errors import NoEffect
from npu_replay.seam.call import Call, armed

MODULE = "megatron.core.transformer.moe.moe_utils"
KERNEL = "fused_topk_with_score_function"
_UNFUSED = "topk_routing_with_score_function"


def is_on(config: Any) -> bool:
    return bool(getattr(config, "moe_router_fusion", False))


class HeldKernel:
    """Makes the kernel ask the armed router call while at least one instance is held."""

    def __init__(self) -> None:
        module: Any = sys.modules.get(MODULE)
        native = getattr(module, KERNEL, None)
        if native is not None:  # without Transformer Engine Megatron itself raises
            _kernel.set(module, KERNEL, _answered(module, native), "it asks a block, or RouterReplay")
        _held.append(self)

    def remove(self) -> None:
        """Release this instance; the last one puts the kernel back, unless it was replaced since."""
        if self in _held:
            _held.remove(self)
        if not _held:
            _kernel.undo()


# The module's name for the kernel is replaced once, and put back by the last holder.
_held: list[HeldKernel] = []
_kernel = Patches("replay of the fused router")


def _answered(module: Any, native: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(native)
    def fused(*args: Any, **kwargs: Any) -> Any:
        call = armed()
        if call is None:
            return native(*args, **kwargs)
        if call.plan.is_given:
            # Both take the same arguments, in the same order.
            return getattr(module, _UNFUSED)(*args, **kwargs, fused=False)
        output = native(*args, **kwargs)
        # Ids that a top-k inside returned keep its order: a recompute sums in the order of its forward.
        if call.ids is None:
            call.is_armed = False  # a top-k after the kernel isn't the router's
            call.note(_ids(output, call))
        return output

    return fused


def _ids(output: Any, call: Call) -> torch.Tensor:
    """Return the experts in a map [rows, experts], ascending: int64 [rows, topk]."""
    routing_map = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    if not isinstance(routing_map, torch.Tensor) or routing_map.shape != (call.rows, call.plan.num_experts):
        raise NoEffect(
            "the fused router's output can't be read",
            expected=f"(probs, routing_map), the map of shape {[call.rows, call.plan.num_experts]}",
            got=type(output) if routing_map is None else getattr(routing_map, "shape", type(routing_map)),
            cause="another Transformer Engine than is known; set moe_router_fusion=False",
        )
    # A top-k over the map: nonzero() would synchronise with the device.
    ids = routing_map.detach().to(torch.float32).topk(call.plan.topk, dim=1).indices
    return ids.sort(dim=1).values
