"""Runs slime's routing replay on a Megatron-core with or without slime's patch.

The patch has two calls: one gives each router a RoutingReplay, one replaces Megatron's top-k. Here a router
gets a RouterReplay instead, whose action is slime's stage (ROUTING_REPLAY_STAGE) and whose ids are in slime's
queues; its loops stay. On a Megatron-core with a RouterReplay of its own slime is left alone. As in slime,
backward has to visit micro-batches in the order of their forwards.

Asks:     when `<framework>.utils.routing_replay` is imported, its names; whether Megatron has a RouterReplay.
Changes:  `register_routing_replay`, `get_routing_replay_compute_topk`; what a new router gets; what reads
          SGLang's arguments in the driver, and is given them in a trainer.
Undone:   by `npu_replay.uninstall()`; routers keep their `routing_replay`, which nobody asks then.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from npu_replay.compat import engines
from npu_replay.compat.megatron_backports import router_init
from npu_replay.compat.megatron_backports.router_replay import (
    MegatronRouterReplay,
    NoTarget,
    RouterReplayAction,
)
from npu_replay.compat.patching import import_hook, known_names
from npu_replay.compat.patching.patches import Change, Patches

FAMILY = ("slime", "vime", "miles")
_ENABLED = "ENABLE_ROUTING_REPLAY"
_STAGE = "ROUTING_REPLAY_STAGE"
_OFF = "fallthrough"
_NEEDED = (
    *("RoutingReplay.all_routing_replays", "RoutingReplay.record", "RoutingReplay.pop_forward"),
    *("RoutingReplay.pop_backward", "RoutingReplay.clear_all", "register_routing_replay"),
    *("get_routing_replay_compute_topk", "set_routing_replay"),
)
_ATTRIBUTE = "routing_replay"
_GIVEN_ARGUMENTS = (("sglang_utils.arguments", "validate_args"), ("megatron_utils.initialize", "init"))
"""Where slime's arguments arrive: in the driver, and in a trainer."""
_CHECKED = "the check of slime's SGLang"
_patches = Patches(_WHAT := "routing replay of slime and its kin")


def install() -> None:
    """Replace the two calls, now or when a framework of the family is imported."""
    for framework in FAMILY:
        import_hook.when_imported(f"{framework}.utils.routing_replay", f"{_WHAT} ({framework})", _wrap)
        for module, function in _GIVEN_ARGUMENTS:
            check = functools.partial(_check_engine, function)
            import_hook.when_imported(f"{framework}.backends.{module}", _CHECKED, check)


def _wrap(module: Any) -> None:
    framework = module.__name__.partition(".")[0]
    known_names.check(module, dict.fromkeys(_NEEDED, ()), "framework's routing replay", framework)
    # Not before Megatron's routers are imported: MindSpeed patches Megatron first.
    import_hook.when_imported(
        router_init.MODULE, f"{_WHAT} ({module.__name__})", lambda _: _take_over(module)
    )


def _check_engine(function: str, module: Any) -> None:
    """Have the arguments of SGLang checked where this module is given slime's."""
    if hasattr(module, function):
        _patches.wrap(module, function, _checked, "R3: an engine that gives no routes is refused")


def _checked(original: Callable[..., Any], args: Any, *more: Any, **named: Any) -> Any:
    if getattr(args, "use_rollout_routing_replay", False):
        engines.check("slime", args)
    return original(args, *more, **named)


def _take_over(module: Any) -> None:
    if not router_init.lacks_replay():
        return  # with a RouterReplay of Megatron's own, slime and its patch are left alone
    _patches.wrap(module, "register_routing_replay", _register, "routers have it already, without a hook")
    _patches.wrap(
        module, "get_routing_replay_compute_topk", _topk, "the top-k stays Megatron's: the seam answers it"
    )
    router_init.made_by(functools.partial(_made, module))
    _patches.add(Change(f"{_ATTRIBUTE} of each TopKRouter", "what slime's loops fill and read"))


def _register(original: Callable[..., Any], router: Any) -> None:
    """Do nothing: slime's patch calls it in the constructor, after which the wrapper equips the router."""


def _topk(original: Callable[..., Any], old_compute_topk: Any) -> Any:
    """Return slime's top-k without a stage; newer releases also note the order of the ids there."""
    theirs = original(old_compute_topk)

    @functools.wraps(theirs)
    def compute_topk(*args: Any, **kwargs: Any) -> Any:
        _muted.append(before := _enabled())
        os.environ[_ENABLED] = "0"
        try:
            return theirs(*args, **kwargs)
        finally:
            os.environ[_ENABLED] = before
            _muted.pop()

    return compute_topk


_muted: list[str] = []
"""The value of the process's variable while slime's function sees another."""


def _enabled() -> str:
    return _muted[-1] if _muted else os.environ.get(_ENABLED, "0")


def _made(module: Any, router: Any) -> MegatronRouterReplay | None:
    """Return the RouterReplay of a router; None in a process without replay (a critic, or no flag)."""
    if _enabled() != "1":
        return None
    theirs = module.RoutingReplay()  # adds itself to all_routing_replays, in the order of building
    # A discarded model isn't filled.
    router_init.leave_with(router, theirs, module.RoutingReplay, "all_routing_replays")
    setattr(router, _ATTRIBUTE, theirs)
    return StagedReplay(theirs)


class StagedReplay(MegatronRouterReplay):
    """Takes its action from slime's stage, and its ids from slime's queues (`theirs`)."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs
        super().__init__()

    @property
    def router_replay_action(self) -> RouterReplayAction | None:
        """The action that slime's stage means; raises ValueError for an unknown stage."""
        stage = os.environ.get(_STAGE, _OFF) if _enabled() == "1" else _OFF
        return None if stage == _OFF else RouterReplayAction(stage)

    @router_replay_action.setter
    def router_replay_action(self, action: object) -> None:
        """Ignore the action: the stage alone decides."""

    def record_indices(self, topk_indices: torch.Tensor) -> None:
        self.theirs.record(topk_indices)

    def _target(self, rows: int, topk: int) -> torch.Tensor:
        backward = self.router_replay_action is RouterReplayAction.REPLAY_BACKWARD
        try:
            ids: torch.Tensor = (self.theirs.pop_backward if backward else self.theirs.pop_forward)()
        except IndexError:
            ids = torch.empty(0, device="cpu")
        if ids.shape != (rows, topk):
            raise NoTarget(
                f"stage {self.router_replay_action} has no ids for this call of the router",
                where="a router"
                if self.layer_number is None
                else f"the router of layer_number {self.layer_number}",
                expected=f"ids {[rows, topk]}",
                got=f"{list(ids.shape)}, after {len(self.theirs.top_indices_list)} were recorded",
                cause="more forwards or recomputes than were recorded or filled; a batch cut otherwise than "
                "the routes; clear_all() in between",
            )
        return ids
