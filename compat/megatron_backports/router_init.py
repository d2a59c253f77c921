"""Gives each TopKRouter what its release lacks, as it is built: methods, and a `router_replay`.

Only the constructor is changed on the class. A method bound to the router itself would keep it alive in a
cycle, and couldn't be unpickled where its class lacks it, so methods are bound to a small object beside the
router. Upstream has all of this from 0.16 on, except for load balancing types that its RouterReplay ignores.

Asks:     whether the class has each method, and whether this Megatron-core has a RouterReplay of its own.
Changes:  `TopKRouter.__init__`; methods and `router_replay` on instances.
Undone:   the constructor is put back. Routers that are alive, and copies of them, keep what they were given,
          which calls their class's methods then.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from npu_replay import environment
from npu_replay.compat.megatron import aux_losses, foreign_routing, fused_router
from npu_replay.compat.megatron.config_flags import asks_for_replay
from npu_replay.compat.megatron.routers import gathered_ranks, is_replaying, top_k_of
from npu_replay.compat.megatron_backports import router_replay
from npu_replay.compat.megatron_backports.router_replay import MegatronRouterReplay
from npu_replay.compat.mindspeed import repatch
from npu_replay.compat.patching import import_hook
from npu_replay.compat.patching.patches import Change, Patches, is_on
from npu_replay.environment import EXPERT_BIAS
from npu_replay.errors import described
from npu_replay.seam.call import armed, running
from npu_replay.seam.guarded import here
from npu_replay.seam.plan import Plan
from npu_replay.seam.torch_state import method_of_class

MODULE = "megatron.core.transformer.moe.router"

_WHAT = "routers that are replayed"
_REPLAY = "router_replay"
_OF_EACH = f"{_REPLAY} of each TopKRouter"
_EVERYONE = "global_router_replay_instances"
_COUNT = "_apply_expert_bias"
_UNHEARD = ("sinkhorn", "quantile_balancing")
"""Load balancing types with a top-k of their own, which upstream's RouterReplay doesn't see."""


def install() -> None:
    import_hook.when_imported(MODULE, _WHAT, _wrap)


def _wrap(module: Any) -> None:
    kind = module.TopKRouter
    if _patches.has(kind, "__init__"):
        return

    def equipping(init: Callable[..., None]) -> Any:
        @functools.wraps(init)
        def router_init(self: Any, *args: Any, **kwargs: Any) -> None:
            init(self, *args, **kwargs)
            # A fork's router may lack an attribute: its model is built all the same.
            with import_hook.attempt(described(type(self)), _WHAT):
                _equip(self)

        return router_init

    repatch.wrap_init(_patches, kind, equipping, "gives each router what this release lacks, as it is built")
    _patches.add(Change(_OF_EACH, "what upstream's have"))
    _patches.add(
        Change(f"methods that a {MODULE}.TopKRouter lacks", "they ask a replay, or count no padding")
    )


def _equip(router: Any) -> None:
    names = [_COUNT] if counts_padding(router) else []
    kind = _router_replay()
    ours = kind is MegatronRouterReplay
    # A RouterReplay if the config asks for it, and None otherwise, as from 0.16 on.
    if getattr(router, _REPLAY, None) is None:
        own = _makers[0](router) if ours and _makers else None
        if own is None and asks_for_replay(router.config):
            own = kind()
        router.router_replay = own
        if own is not None and ours:
            own.layer_number = router.layer_number
            leave_with(router, own, kind)
    _hand_over_one(router)
    if ours:
        names += ["forward", "routing", "set_layer_number"]
        losses = aux_losses.of(router)
        if losses is not None and losses.follow:
            names.append("apply_load_balancing_loss")
    elif fused_router.is_on(router.config) or router.routing_type in _UNHEARD:
        names += ["forward", "routing"]
    # A method that the instance has already is left.
    lent = [name for name in names if name not in vars(router)]
    methods = RouterMethods(router, lent)
    for name in lent:
        setattr(router, name, getattr(methods, name))


# ---- methods that a router is given


def counts_padding(router: Any) -> bool:
    """Return whether the router's class applies a padding mask wrongly to the counts of an expert bias."""
    count: Any = getattr(type(router), _COUNT, None)
    has_bias = count is not None and getattr(router, "enable_expert_bias", False)
    if not has_bias:
        return False
    # MindSpeed replaces torch.compile, which Megatron puts around the method, by a function without names.
    parameters = inspect.signature(count).parameters.values()
    return any(
        parameter.name == "padding_mask" or parameter.kind is parameter.VAR_KEYWORD
        for parameter in parameters
    )


class RouterMethods:
    """Holds the methods of one router, which `names` lists."""

    def __init__(self, router: Any, names: Iterable[str]) -> None:
        self._router = weakref.ref(router)
        self.names = list(names)
        self._plans: dict[tuple[object, ...], Plan] = {}  # of calls, by what they depend on

    def __reduce__(self) -> tuple[Any, ...]:
        # A deep copy or a pickle of a router takes its bound methods along: they get an object of their own.
        return type(self), (self.router, self.names)

    @property
    def router(self) -> Any:
        return self._router()

    def of_class(self, name: str) -> Any:
        """Return the class's method, bound to the router; looked up each time, since MindSpeed patches it."""
        return method_of_class(self.router, name).__get__(self.router, type(self.router))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the router's forward, in which its top-k or its fused kernel asks `router_replay`."""
        return self._asking("forward", args, kwargs)

    def routing(self, *args: Any, **kwargs: Any) -> Any:
        """Run the router's routing, for callers that call it directly; its top-k asks `router_replay`."""
        return self._asking("routing", args, kwargs)

    def _asking(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the class's method, with a call of the router armed if its `router_replay` may answer."""
        router = self.router
        plain = self.of_class(name)
        replay = getattr(router, _REPLAY, None)
        outer = armed()
        asks_already = isinstance(outer, router_replay.Asked) and outer.replay is replay
        if not is_on() or router_replay.is_idle(replay) or asks_already:
            return plain(*args, **kwargs)
        # A framework with a replay of its own, as verl, also has its own routing that asks it.
        if not isinstance(replay, MegatronRouterReplay) and foreign_routing.replays(type(router)):
            return plain(*args, **kwargs)
        # Hidden states or logits: all dimensions but the last count tokens.
        inputs = next(iter((*args, *kwargs.values())))
        config = router.config
        known = {"is_given": is_replaying(replay), **top_k_of(router)}
        key = (*known.values(), router.training)
        plan = self._plans.get(key) or Plan(**known)
        call = router_replay.Asked(
            replay,
            plan,
            rows=inputs.numel() // inputs.shape[-1] * gathered_ranks(config),
            groups=(config.moe_router_num_groups, config.moe_router_group_topk),
            owner=router,
            compares=plan.is_given and self._compares(),
        )
        try:
            with router_replay.asking(call, fused=fused_router.is_on(config)):
                return plain(*args, **kwargs)
        finally:
            if plan.way != call.way:
                # Once the guard has caught the top-k, the function mode stays off.
                self._plans[key] = call.learned()

    def _compares(self) -> bool:
        """Return whether an aux loss follows the ids of the call, and has to be given the live ones."""
        losses = aux_losses.of(self.router)
        return losses is not None and losses.follow_the_call_of(self.router)

    def apply_load_balancing_loss(self, activation: Any, load_balancing_loss_func: Any) -> Any:
        """Run the router's method; in a replay it counts the live choice, as upstream's do."""
        loss = load_balancing_loss_func
        call = running(self.router)
        if is_on() and call is not None and call.own_ids is not None and call.ids is not None:
            loss = aux_losses.recounted(loss, (call.own_ids, call.ids))
        return self.of_class("apply_load_balancing_loss")(activation, loss)

    def set_layer_number(self, layer_number: int) -> None:
        self.of_class("set_layer_number")(layer_number)
        if getattr(self.router, _REPLAY, None) is not None:
            self.router.router_replay.layer_number = layer_number

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Count the tokens of a map, bool [rows, experts], without those of the mask, bool [rows].

        Megatron-core 0.16 to 0.19 apply the mask along the experts instead of the rows. They do so here, too,
        where neither replay nor NPU_REPLAY_EXPERT_BIAS asks for other counts.
        """
        count = self.of_class(_COUNT)
        if padding_mask is None:
            count(routing_map)
        elif self._counts_rows():
            count(routing_map & ~padding_mask.reshape(-1, 1))
        else:
            count(routing_map, padding_mask=padding_mask)

    def _counts_rows(self) -> bool:
        replaying = here.call is not None and here.call.plan.is_given
        asked = replaying or asks_for_replay(self.router.config) or environment.read(EXPERT_BIAS, False)
        return bool(asked and is_on())


# ---- the `router_replay` of a router


def _router_replay() -> Any:
    """Return upstream's class, or ours in its place."""
    try:
        return importlib.import_module(router_replay.MODULE).RouterReplay
    except ModuleNotFoundError:  # the module isn't served, since `router_replay.install` wasn't called
        return MegatronRouterReplay


def lacks_replay() -> bool:
    return _router_replay() is MegatronRouterReplay


_makers: list[Callable[[Any], MegatronRouterReplay | None]] = []
"""The function of a framework that asks for a replay by other means than the config's flag."""
_framework: list[Callable[[Any], Any]] = []
"""The function that makes a framework's own instance, after `hand_over`."""


def made_by(make: Callable[[Any], MegatronRouterReplay | None]) -> None:
    """Use `make(router)` as the `router_replay` of each router built from now on, if it isn't None."""
    _makers[:] = [make]
    _patches.add(Change("the routers that are replayed", "as a framework asks for them"))


def hand_over(of: Callable[[Any], Any]) -> None:
    """Use a framework's own `of(router)` in each router that asks for replay and is built from now on."""
    install()  # before a line is added to `_patches`, which would look installed
    if not _framework:
        _patches.add(Change(_OF_EACH, "the framework's own"))
    _framework[:] = [of]


def _hand_over_one(router: Any) -> None:
    """Replace a router's instance by the framework's, also in Megatron's list of all: its API reaches it."""
    own = getattr(router, _REPLAY, None)
    everyone = getattr(type(own), _EVERYONE, None)
    if not _framework or everyone is None:
        return
    new = _framework[0](router)
    everyone[:] = [new if replay is own else replay for replay in everyone]
    new.layer_number = getattr(own, "layer_number", None)
    router.router_replay = new
    leave_with(router, new, type(own))


def leave_with(router: Any, replay: Any, kind: Any, listed: str = _EVERYONE) -> None:
    """Remove an instance from its class's list of all when its router is garbage."""
    # A weak reference: the finalizer would otherwise keep the instance alive as long as its router.
    mine = weakref.ref(replay)

    def leave() -> None:
        everyone = getattr(kind, listed)
        everyone[:] = [other for other in everyone if other is not mine()]

    weakref.finalize(router, leave).atexit = False


_patches = Patches(_WHAT)
