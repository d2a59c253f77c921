"""What the seam does in a call of a Megatron router that chooses in another way than by one plain top-k.

The fused router (`moe_router_fusion`, Megatron-core 0.14 on) is one kernel of Transformer Engine and has no
top-k, so upstream's own replay never hears of it. Here a call that keeps the router's choice takes it down
from the map that the kernel returned; a call that is given its experts goes the unfused way, through the same
function of Megatron's without `fused`. Quantile balancing asks its top-k for more experts than it uses.

Asks:     the router's config and routing type.
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
from npu_replay.sessions.capacity import CapacityCall
from npu_replay.sessions.hooks import outside_modes

MODULE = "megatron.core.transformer.moe.moe_utils"
KERNEL = "fused_topk_with_score_function"
_UNFUSED = "topk_routing_with_score_function"


class MegatronCall(CapacityCall):
    """A call of a router that is fused, or asks for more experts than it uses.

    Args:
        drops: tokens over an expert's capacity are dropped.
        spare: the router asks its top-k for so many more than it uses; they come last, and stay its own.
    """

    def __init__(self, *about: Any, drops: bool = False, spare: int = 0, **options: Any) -> None:
        super().__init__(*about, **options)
        self.drops = drops
        self.spare = spare

    def _wants(self, k: object, dim: object) -> bool:
        asked = k - self.spare if isinstance(k, int) and self.ids is None else k
        return super()._wants(asked, dim)

    def answer(
        self, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], way: str
    ) -> Any:
        """Answer the top-k; `ids` are those that the router uses."""
        answered = super().answer(native, args, kwargs, way)
        if self.spare and self.ids is not None:
            self.ids = self.ids[:, : self.topk]
            with outside_modes():  # what the router got are its top-k's own
                self.values = self.unmasked(self.scores).detach().gather(1, self.ids)
            self.made = None
        return answered

    def _decide(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.spare:
            return super()._decide(scores)
        with outside_modes():
            ids = self.choose(self)
        return self._with_spare(scores, ids)

    def _with_spare(self, scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = self._native(scores, *self._args, **self._kwargs)
        self.handed = None  # the router gets these, and no copy of the ids alone
        return values, torch.cat([ids, places[:, self.topk :]], dim=1)

    def _native_ids(self, scores: torch.Tensor) -> torch.Tensor:
        return super()._native_ids(scores)[:, : self.topk]

    def note(self, read: Callable[[], torch.Tensor]) -> None:
        """Take down what a fused kernel chose, which no top-k can be answered for.

        Args:
            read: gives the ids, int64 [rows, topk]; what it does is not the router's doing any more.
        """
        seam.arm(None)
        self.own_ids = read()
        self._noted(self.own_ids)
        self.ids, self.way = self.own_ids, "fused"

    def _noted(self, ids: torch.Tensor) -> None:
        """Count as strayed a recompute whose kernel chose others than its forward."""
        wanted = self.choose(self)
        if wanted is not ids:
            self.strayed = (wanted != ids).any()


def of(router: Any, *, drops: bool) -> Callable[..., seam.Call] | None:
    """Return what makes the seam's part in a call of this router; None where it is the plain one."""
    if not spare(router) and not is_fused(router.config):
        return None
    return functools.partial(MegatronCall, drops=drops, spare=spare(router))


def spare(router: Any) -> int:
    """Return how many experts it asks for and doesn't use: of quantile balancing's one it reads its limit."""
    return int(router.routing_type == "quantile_balancing")


def is_fused(config: Any) -> bool:
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
        call: Any = seam.armed()  # a MegatronCall: the router is fused
        if call is None:
            return native(*args, **kwargs)
        if call.given:
            # Both take the same arguments, in the same order.
            return getattr(module, _UNFUSED)(*args, **kwargs, fused=False)
        output = native(*args, **kwargs)
        call.note(lambda: _ids(output, call))
        return output

    return fused


def _ids(output: Any, call: seam.Call) -> torch.Tensor:
    """Return the experts in a map [rows, experts], ascending: int64 [rows, topk]."""
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
