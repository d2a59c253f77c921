"""Each TopKRouter gets what its release lacks as it is built; a replayed one also its `router_replay`.

The one change of a class is that of its constructor. All else is done to the router that it has made: methods
lent to the instance, where the class hasn't got them or has them without replay. From Megatron-core 0.16 on
upstream does this itself, but for the ways of choosing that its RouterReplay never hears of.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import sys
import weakref
from collections.abc import Callable
from typing import Any

from npu_replay.compat.megatron import aux_losses, fused_router
from npu_replay.compat.megatron.config_flags import asks_for_replay
from npu_replay.compat.megatron.routers import gathered_ranks, is_replaying, spare
from npu_replay.compat.megatron_backports import router_methods, router_replay
from npu_replay.compat.megatron_backports.router_replay import MegatronRouterReplay
from npu_replay.compat.mindspeed import repatch
from npu_replay.compat.patching import import_hook
from npu_replay.compat.patching.live_objects import alive, alive_in_models
from npu_replay.compat.patching.patches import Change, Patches
from npu_replay.errors import described
from npu_replay.sessions import seam

MODULE = "megatron.core.transformer.moe.router"

_WHAT = "routers that are replayed"
_WHY = "gives each router what this release lacks, as it is built"
_REPLAY = "router_replay"
_OF_EACH = f"{_REPLAY} of each TopKRouter"
_UNHEARD = ("sinkhorn", "quantile_balancing")
"""Load balancing types with a top-k of their own, of which upstream's RouterReplay never hears."""


def install() -> None:
    """Equip Megatron's routers, now or when their module is imported; those that are built from then on."""
    import_hook.when_imported(MODULE, _WHAT, _wrap)


def _wrap(module: Any) -> None:
    kind = module.TopKRouter
    if _patches.has(kind, "__init__"):
        return
    try:
        repatch.wrap_init(_patches, kind, _router_init, _WHY)
        _patches.add(Change(_OF_EACH, "what upstream's have", functools.partial(_take_back, kind)))
        for router in in_order(kind):
            _equip(router)  # built before npu_replay was imported, or before an uninstall()
    except Exception:
        _patches.undo()  # all or nothing
        raise


def in_order(kind: type) -> list[Any]:
    """Return the live routers in the order of their making; those without a number are the younger ones."""
    found = alive(kind)
    numbered = all(one in _numbers for one in found)
    places = {id(one): place for place, one in enumerate(() if numbered else alive_in_models(kind))}
    return sorted(found, key=lambda one: (_numbers.get(one, math.inf), places.get(id(one), math.inf)))


def _router_init(init: Callable[..., None]) -> Any:
    @functools.wraps(init)
    def router_init(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if list(_patches):  # else uninstalled, and somebody still calls it
            # A fork's router may lack what is asked of it; its model is built all the same.
            import_hook.attempt(described(type(self)), _WHAT, lambda: _equip(self))

    return router_init


_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_next = itertools.count()


def _equip(router: Any) -> None:
    _numbers.setdefault(router, next(_next))
    router_methods.equip(router)
    kind = _router_replay()
    _give(router, kind)
    _hand_over_one(router)
    if kind is MegatronRouterReplay:
        names = ["forward", "routing", "set_layer_number"]
        losses = aux_losses.of(router)
        if losses is not None and losses.follow:
            names.append("apply_load_balancing_loss")
        router_methods.bind(router, _Asks, names)
    elif fused_router.is_on(router.config) or router.routing_type in _UNHEARD:
        router_methods.bind(router, _Asks, ["forward", "routing"])


def _router_replay() -> Any:
    """Upstream's, or ours in its place."""
    try:
        return importlib.import_module(router_replay.MODULE).RouterReplay
    except ModuleNotFoundError:  # not served: `router_replay.install` wasn't called
        return MegatronRouterReplay


# The `router_replay` of a router


def _give(router: Any, kind: Any) -> None:
    """A router of a config with the flag has a RouterReplay, any other None; as from 0.16 on."""
    had = hasattr(router, _REPLAY)
    if had and router.router_replay is not None:
        return
    made = (make(router) for make in _makers) if kind is MegatronRouterReplay else ()
    own = next((one for one in made if one is not None), None)
    if own is None and asks_for_replay(router.config):
        own = kind()
    if own is not None or not had:
        router.router_replay = own
        _given[router] = had
    if own is not None and kind is MegatronRouterReplay:
        router.router_replay.layer_number = router.layer_number
        router_replay.leave_with(router, router.router_replay, kind)


_makers: list[Callable[[Any], MegatronRouterReplay | None]] = []
"""Of frameworks that ask for a replay by other means than the config's flag."""


def made_by(make: Callable[[Any], MegatronRouterReplay | None]) -> None:
    """Have `make(router)` for the `router_replay` of each router built from now on, if it isn't None."""
    _makers.append(make)
    _patches.add(Change("the routers that are replayed", "as a framework asks for them", _forget_makers))


def _forget_makers() -> bool:
    _makers.clear()
    return True


def lacks_replay() -> bool:
    """Has this Megatron-core no RouterReplay of its own?"""
    return _router_replay() is MegatronRouterReplay


_given: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
"""Routers that got their `router_replay` here; had they the attribute before, as None?"""


def _take_back(topk_router: type) -> bool:
    """Take them off, off copies of routers too, and out of the list of all."""
    for router, had in list(_given.items()):
        replay = vars(router).pop(_REPLAY, None)
        if had:
            router.router_replay = None
        if hasattr(type(replay), _EVERYONE):
            router_replay.leave(replay, type(replay))
    _given.clear()
    for copy in alive(topk_router):
        if isinstance(vars(copy).get(_REPLAY), MegatronRouterReplay):
            delattr(copy, _REPLAY)
    return True


def hand_over(of: Callable[[Any], Any]) -> None:
    """Have `of(router)` for the `router_replay` of each router that asks for replay: a framework's, by which
    its loops turn a replay on. Those that are there get it now, others as they are built."""
    install()  # a line of ours in the report would say that it was
    kind: Any = sys.modules[MODULE].TopKRouter
    if not _framework:
        _patches.add(Change(_OF_EACH, "the framework's own", functools.partial(_hand_back, kind)))
    _framework[:] = [of]
    for router in in_order(kind):
        _hand_over_one(router)


def _hand_over_one(router: Any) -> None:
    own = getattr(router, _REPLAY, None)
    if not _framework or not hasattr(type(own), _EVERYONE):
        return
    _handed[router] = own
    framework = _framework[0](router)
    framework.layer_number = getattr(own, "layer_number", None)
    _swap(router, framework, own, type(own))
    router_replay.leave_with(router, framework, type(own))


def _hand_back(topk_router: type) -> bool:
    """Give each router again what it had before; a copy that was made since, a new one."""
    _framework.clear()
    for router in alive(topk_router):
        framework = getattr(router, _REPLAY, None)
        if framework is not None and not hasattr(type(framework), _EVERYONE):
            own = _handed.get(router)
            if own is None:
                own = _router_replay()()
                router_replay.leave(own, type(own))  # a copy's is in no list
            _swap(router, own, framework, type(own))
    _handed.clear()
    return True


def _swap(router: Any, new: Any, old: Any, kind: Any) -> None:
    """Also in Megatron's list of all, so that its own API reaches what the routers have."""
    everyone = getattr(kind, _EVERYONE)
    everyone[:] = [new if one is old else one for one in everyone]
    router.router_replay = new


_EVERYONE = "global_router_replay_instances"
_framework: list[Callable[[Any], Any]] = []
"""Makes a framework's own, while one has taken over."""
_handed: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""What each router had before."""


# How its top-k comes to ask


class _Asks(router_methods.RouterMethods):
    why = "its top-k asks router_replay"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The router's own, in which its top-k, or its fused kernel, asks `router_replay`."""
        return _asking(self.router, self.of_class("forward"), args, kwargs)

    def routing(self, *args: Any, **kwargs: Any) -> Any:
        """The same, for those that call it by itself."""
        return _asking(self.router, self.of_class("routing"), args, kwargs)

    def apply_load_balancing_loss(self, activation: Any, load_balancing_loss_func: Any) -> Any:
        """The router's own; in a replay it counts the live choice, as upstream's do."""
        loss, call = load_balancing_loss_func, seam.running(self.router)
        if call is not None and call.own_ids is not None and call.ids is not None:
            loss = aux_losses.recounted(loss, (call.own_ids, call.ids))
        return self.of_class("apply_load_balancing_loss")(activation, loss)

    def set_layer_number(self, layer_number: int) -> None:
        """The router's own; its `router_replay` is told."""
        router = self.router
        self.of_class("set_layer_number")(layer_number)
        replay = getattr(router, "router_replay", None)
        if replay is not None:
            replay.layer_number = layer_number


def _asking(router: Any, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what the class has, with a call of the router armed if its `router_replay` may want one."""
    replay = getattr(router, "router_replay", None)  # uninstalled, and somebody's wrapper still calls it
    outer = seam.armed()
    asks_already = isinstance(outer, router_replay.Asked) and outer.replay is replay
    if router_replay.is_idle(replay) or asks_already or _is_left_to_its_own(router, replay):
        return plain(*args, **kwargs)
    call = _call(router, replay, next(iter((*args, *kwargs.values()))))
    call.owner = router
    with router_replay.asked(call, fused=fused_router.is_on(router.config)):
        return plain(*args, **kwargs)


def _is_left_to_its_own(router: Any, replay: Any) -> bool:
    """Does a framework that brought its own replay bring the routing that asks it too, as verl's does?"""
    if isinstance(replay, MegatronRouterReplay):
        return False
    return type(router).routing.__module__.partition(".")[0] not in ("megatron", "mindspeed")


def _call(router: Any, replay: Any, inputs: Any) -> router_replay.Asked:
    """A call of a router whose input or logits end in one dimension that isn't tokens."""
    config, losses = router.config, aux_losses.of(router)
    return router_replay.Asked(
        replay,
        inputs.numel() // inputs.shape[-1] * gathered_ranks(config),
        int(router.num_experts),
        int(router.topk),
        groups=(config.moe_router_num_groups, config.moe_router_group_topk),
        spare=spare(router),
        compares=losses is not None and is_replaying(replay) and losses.follow_the_call_of(router),
    )


_patches = Patches(_WHAT, beneath=repatch.undo)
