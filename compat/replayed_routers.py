"""Each TopKRouter gets what its release lacks as it is built; a replayed one also its `router_replay`.

The one change of a class is that of its constructor. All else is done to the router that it has made: methods
lent to the instance, where the class hasn't got them or has them without replay. From Megatron-core 0.16 on
upstream does this itself, but for the ways of choosing that its RouterReplay never hears of.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from npu_replay.compat import (
    aux_losses,
    beneath_mindspeed,
    expert_bias,
    fused_router,
    import_hook,
    megatron,
    router_methods,
    router_replay,
)
from npu_replay.compat.config_flags import REPLAY
from npu_replay.compat.patching import Patches
from npu_replay.routers import Handle

MODULE = "megatron.core.transformer.moe.router"

_WHAT = "routers that are replayed"
_WHY = "gives each router what this release lacks, as it is built"
_UNHEARD = ("sinkhorn", "quantile_balancing")
"""Load balancing types with a top-k of their own, of which upstream's RouterReplay never hears."""


def install() -> None:
    """Equip Megatron's routers, now or when their module is imported; those that are built from then on."""
    import_hook.when_imported(MODULE, _WHAT, _wrap)


def _wrap(module: Any) -> None:
    if not any(patch.owner is module.TopKRouter for patch in _patches):
        beneath_mindspeed.wrap_init(_patches, module.TopKRouter, _router_init, _WHY)


def _router_init(init: Callable[..., None]) -> Any:
    @functools.wraps(init)
    def router_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if list(_patches):  # else uninstalled, and somebody still calls it
            _equip(self)

    return router_init


def _equip(router: Any) -> None:
    router_methods.equip(router)
    expert_bias.equip(router)
    if not hasattr(router, "router_replay"):
        router.router_replay = None  # what upstream's have without the flag
    if not any(getattr(router.config, flag, False) for flag in REPLAY):
        return
    replay = router.router_replay
    if replay is None:
        # Upstream's own, where it is there and the flag was set by its other name, or ours under its name.
        replay = router.router_replay = importlib.import_module(router_replay.MODULE).RouterReplay()
    if isinstance(replay, router_replay.RouterReplay):
        router_replay.belongs(replay, router)
        router_methods.lend(router, _Asks, ("routing", "set_layer_number"))
    elif fused_router.is_on(router.config) or router.routing_type in _UNHEARD:
        router_methods.lend(router, _Asks, ("routing",))


class _Asks(router_methods.Lent):
    why = "its top-k asks router_replay"

    def routing(self, logits: Any, *args: Any, **kwargs: Any) -> Any:
        """The router's own, in which its top-k, or its fused kernel, asks `router_replay`."""
        router = self.router
        plain = type(router).routing  # looked up each time: MindSpeed may replace it
        replay = router.router_replay
        if replay is None or replay.router_replay_action is None:
            return plain(router, logits, *args, **kwargs)
        config = router.config
        rows = logits.numel() // logits.shape[-1] * megatron.gathered_ranks(config)
        losses = aux_losses.of(router)
        call = router_replay.Asked(
            replay,
            rows,
            int(logits.shape[-1]),
            int(router.topk),
            num_groups=config.moe_router_num_groups,
            group_topk=config.moe_router_group_topk,
            spare=megatron.spare(router),
            compares=losses is not None
            and losses.follow
            and router_replay.is_replaying(replay)
            and router.training
            and torch.is_grad_enabled(),  # the losses are left out elsewhere
        )
        handles: list[Handle] = []
        if losses is not None and call.compares:
            handles.append(losses.recount(lambda: call.own_ids))  # as upstream's: the live ones
        if fused_router.is_on(config):
            handles.append(fused_router.hold())
        try:
            with router_replay.asked(call):
                return plain(router, logits, *args, **kwargs)
        finally:
            for handle in handles:
                handle.remove()

    def set_layer_number(self, layer_number: int) -> None:
        """The router's own; its `router_replay` is told."""
        router = self.router
        type(router).set_layer_number(router, layer_number)
        if router.router_replay is not None:
            router.router_replay.layer_number = layer_number


_patches = Patches(_WHAT, beneath=beneath_mindspeed.undo)
