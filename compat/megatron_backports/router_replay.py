"""Provides Megatron-core's RouterReplay for the releases that lack it, 0.12 to 0.15.

`install` serves it under upstream's module name, with the API and meaning of 0.16; the static buffers that
0.17 adds for graphs of an inference engine aren't there. Upstream's router calls `get_replay_topk` itself;
here the router's top-k calls it through the seam (`Asked`). As upstream's, it has a global action and a queue
of targets, so backward has to visit micro-batches in the order of their forwards.

Asks:     whether the release has the module.
Changes:  nothing of Megatron's; the module can be imported. `torch.topk` asks while a RouterReplay has an
          action, and while `asking` is open.
Undone:   the module is taken away.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch

from npu_replay.compat.megatron import fused_router
from npu_replay.compat.megatron.routers import IDLE_WITHOUT_ACTION, action_of, is_replaying
from npu_replay.compat.patching import import_hook
from npu_replay.errors import NoEffect, ReplayError, RouterError
from npu_replay.seam.call import Call, armed
from npu_replay.seam.guarded import guard, here
from npu_replay.seam.masks import unfilled
from npu_replay.seam.plan import Plan

MODULE = "megatron.core.transformer.moe.router_replay"

Groups = tuple[int | None, int | None]


def install() -> None:
    """Make the module importable where this Megatron-core lacks it."""

    def fill(module: Any) -> None:
        module.__doc__ = __doc__
        module.RouterReplay = MegatronRouterReplay
        module.RouterReplayAction = RouterReplayAction

    why = "RouterReplay, as from Megatron-core 0.16 on"
    import_hook.serve(MODULE, fill, why, "upstream's routing replay API")


class AnotherNumber(ReplayError, ValueError, AssertionError):
    """Raised when the number of layers isn't that of the routers; derives from what upstream raises."""


class NoTarget(RouterError, IndexError):
    """Raised when a replay has no ids that fit; derives from what upstream raises for an empty queue."""


class RouterReplayAction(Enum):
    """Lists the actions of a router's top-k."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    """Use the target that was set last."""
    REPLAY_BACKWARD = "replay_backward"
    """Use the oldest target that no recompute has used yet."""


class MegatronRouterReplay:
    """Records or replays the expert ids of one router, int [rows, topk], in the router's order of rows.

    Training loops import it as Megatron's `RouterReplay`.

    >>> from npu_replay.compat.megatron_backports.router_replay import *
    >>> replay = MegatronRouterReplay()
    >>> replay.set_target_indices(torch.tensor([[2, 0]]))
    >>> replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    >>> replay.get_replay_topk(torch.tensor([[0.1, 0.6, 0.3]]), topk=2)
    (tensor([[0.3000, 0.1000]]), tensor([[2, 0]]))
    >>> replay.global_router_replay_instances.remove(replay)

    Attributes:
        global_router_replay_instances: all instances in the order of creation. The instance of a router is
            removed when the router is garbage, so a discarded model shifts nothing.
        target_topk_idx: what the next REPLAY_FORWARD uses.
        recorded_topk_idx: the ids of the last call under RECORD.
        router_replay_action: None for the router's own choice.
        replay_backward_list: targets for REPLAY_BACKWARD, oldest first.
        layer_number: of its router, from 1 on; None without one.
    """

    global_router_replay_instances: list[MegatronRouterReplay] = []  # noqa: RUF012  upstream's name and kind

    def __init__(self) -> None:
        self.target_topk_idx: torch.Tensor | None = None
        self.recorded_topk_idx: torch.Tensor | None = None
        self._action: RouterReplayAction | None = None
        self.replay_backward_list: list[torch.Tensor] = []
        self.layer_number: int | None = None
        _everyone().append(self)

    # All of them

    @staticmethod
    def set_replay_data(all_layers_topk_indices: list[torch.Tensor]) -> None:
        """Set the target of every router, in the order of creation.

        Raises:
            ValueError: the number of tensors isn't the number of routers.
            RouterError: an element is no tensor of ids; no target has been set then.
        """
        if (got := len(all_layers_topk_indices)) != (wanted := len(_everyone())):
            raise AnotherNumber(
                "another number of tensors than of routers with a replay",
                expected=wanted,
                got=got,
                cause="layers of another pipeline stage, or a second model in this process with the flag",
            )
        pairs = list(zip(_everyone(), all_layers_topk_indices, strict=True))
        for replay, ids in pairs:
            _check_ids(ids, replay)  # a framework's own may be among them
        for replay, ids in pairs:
            replay.set_target_indices(ids)

    @staticmethod
    def get_recorded_data() -> list[torch.Tensor | None]:
        return [replay.get_recorded_indices() for replay in _everyone()]

    @staticmethod
    def clear_global_indices() -> None:
        for replay in _everyone():
            replay.clear_indices()

    @staticmethod
    def set_global_router_replay_action(router_replay_action: RouterReplayAction) -> None:
        for replay in _everyone():
            replay.set_router_replay_action(router_replay_action)

    @staticmethod
    def clear_global_router_replay_action() -> None:
        for replay in _everyone():
            replay.clear_router_replay_action()

    @staticmethod
    def clear_global_router_replay_instances() -> None:
        """Empty the list of instances; each of them goes on working."""
        _everyone().clear()

    # One

    @property
    def router_replay_action(self) -> RouterReplayAction | None:
        return self._action

    @router_replay_action.setter
    def router_replay_action(self, action: RouterReplayAction | None) -> None:
        self._action = action
        key = id(self)
        if action is None:
            _acts_no_more(key)
        elif key not in _acting:
            _acting[key] = weakref.ref(self, lambda _: _acts_no_more(key))
            # In each call this would cost 50 µs: torch caches the methods of Tensor until one is replaced.
            guard.install(MODULE)

    def set_target_indices(self, topk_indices: Any) -> None:
        """Set the ids of this router's next forward, int [rows, topk], and queue them for its recompute."""
        _check_ids(topk_indices, self)
        self.target_topk_idx = topk_indices
        self.replay_backward_list.append(topk_indices)

    def get_recorded_indices(self) -> torch.Tensor | None:
        """Return the ids of the last call under RECORD, int64 [rows, topk]."""
        return self.recorded_topk_idx

    def record_indices(self, topk_indices: torch.Tensor) -> None:
        self.recorded_topk_idx = topk_indices

    def clear_indices(self) -> None:
        self.recorded_topk_idx = self.target_topk_idx = None
        self.replay_backward_list = []

    def set_router_replay_action(self, router_replay_action: RouterReplayAction) -> None:
        """Set this router's action; a framework's own enum with the same values is accepted."""
        action: Any = router_replay_action
        self.router_replay_action = (
            None if action is None else RouterReplayAction(getattr(action, "value", action))
        )

    def clear_router_replay_action(self) -> None:
        self.router_replay_action = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the top-k of scores [rows, experts] under the action: values and int64 ids, [rows, topk].

        `default_compute_topk(scores, topk, num_groups=..., group_topk=...)` is asked for the router's own.
        """
        if is_replaying(self):
            ids = self._target(len(scores), topk).to(scores.device, torch.int64)
            call = armed()
            if isinstance(call, Asked) and call.replay is self:
                # The routing asked by itself, as upstream's does, and calls no top-k: answered here.
                call.answered(ids, "inner")
            return scores.gather(1, ids), ids
        values, ids = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.router_replay_action is RouterReplayAction.RECORD:
            self.record_indices(ids)
        return values, ids

    def _target(self, rows: int, topk: int) -> torch.Tensor:
        """Return the ids of a replayed call. A subclass may keep its ids elsewhere."""
        ids = self.target_topk_idx
        cause = "set_replay_data() was not called before this forward, or with ids of another"
        if self.router_replay_action is RouterReplayAction.REPLAY_BACKWARD:
            ids = self.replay_backward_list.pop(0) if self.replay_backward_list else None
            cause = (
                "more recomputes than targets since clear_global_indices(), or a backward that doesn't "
                "go through the micro-batches in the order of their forwards"
            )
        if ids is None or ids.shape != (rows, topk):
            raise NoTarget(
                f"{self.router_replay_action} has no ids for this call of the router",
                where=_place(self),
                expected=f"targets of shape {[rows, topk]}",
                got="none" if ids is None else list(ids.shape),
                cause=cause,
            )
        return ids


_acting: dict[int, weakref.ref[MegatronRouterReplay]] = {}
"""Holds the instances that have an action, by their id: torch's names are replaced while there is one."""


def _acts_no_more(key: int) -> None:
    _acting.pop(key, None)
    if not _acting:
        guard.remove(MODULE)


def is_idle(replay: Any) -> bool:
    """Return whether calling this RouterReplay would change nothing."""
    ask = getattr(replay, "get_replay_topk", None)
    if ask is None:
        return True  # None, or a framework's own class, which its own routing handles
    if action_of(replay) is not None:
        return False
    # Upstream asks in every call, and a framework may have wrapped the method. Upstream's and ours have the
    # globals of the module that defines them; a wrapper, or a framework's own method, has other globals.
    names = getattr(ask, "__globals__", None)
    product = sys.modules.get(MODULE)
    plain = names is globals() or (product is not None and names is vars(product))
    return plain or hasattr(type(replay), IDLE_WITHOUT_ACTION)


class Asked(Call):
    """Lets the top-k of a router's call ask a RouterReplay, ours or a framework's.

    `groups` are the number of groups and of chosen ones; `compares`: compute the live choice, too.
    """

    def __init__(
        self,
        replay: Any,
        plan: Plan,
        rows: int,
        groups: Groups = (None, None),
        *,
        owner: Any = None,
        compares: bool = False,
    ) -> None:
        super().__init__(owner, plan, rows=rows)
        self.replay = replay
        self._groups = groups
        self._compares = compares

    def matches(self, scores: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        # A second top-k of the same scores is the aux loss's and stays live; one of a capacity drops tokens.
        return (self.ids is None or self.plan.drops) and super().matches(scores, args, kwargs)

    def decide(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outer = self.outer
        topk = self.plan.topk
        _, args, kwargs = self.taken_by

        def own(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
            """Run the top-k as it was called, on scores masked by groups; an outer call is answered once."""
            try:
                if outer is not None and outer.ids is None:
                    outer.fills = self.fills  # of the masks before its top-k
                    here.call = outer
                values, ids = torch.topk(scores, *args, **kwargs)
            finally:
                here.call = self
            return values[:, :topk], ids[:, :topk]

        if self._compares:
            self.own()
        before = unfilled(scores, self.fills, topk, self.plan.leaves) if self.plan.is_given else scores
        values, ids = self.replay.get_replay_topk(before, topk, *self._groups, own)
        if isinstance(outer, Asked) and outer.replay is self.replay:
            outer.answered(ids, "inner")  # the routing that armed the outer call is answered, too
        return values, ids

    def note(self, ids: torch.Tensor) -> None:
        """Have the choice of a fused call recorded."""
        none = ids.new_empty(len(ids), 0, dtype=torch.float32)
        self.replay.get_replay_topk(none, self.plan.topk, *self._groups, lambda *_, **__: (ids, ids))
        super().note(ids)


@contextlib.contextmanager
def asking(call: Asked, *, fused: bool = False) -> Iterator[None]:
    """Let the next matching top-k of this thread be answered, with `fused` the router's kernel too.

    Raises:
        NoEffect: no top-k came, and the RouterReplay has an action.
    """
    kernel = fused_router.HeldKernel() if fused else None
    guard.install(call)
    try:
        with call:
            yield
    finally:
        guard.remove(call)
        if kernel is not None:
            kernel.remove()
    if call.ids is None and action_of(call.replay) is not None:
        raise NoEffect(
            "RouterReplay has an action, and this router calls no top-k that could ask it",
            expected=f"a top-{call.plan.topk} over {call.plan.num_experts} experts",
            got="none",
            cause="a selection that is made without torch.topk: by a hash, by a kernel, or in turn",
        )


def _everyone() -> list[MegatronRouterReplay]:
    return MegatronRouterReplay.global_router_replay_instances


def _place(replay: Any) -> str:
    number = replay.layer_number
    return "a router" if number is None else f"the router of layer_number {number}"


def _check_ids(ids: Any, replay: Any) -> None:
    is_tensor = isinstance(ids, torch.Tensor)
    if not is_tensor or ids.dim() != 2 or ids.is_floating_point() or ids.dtype == torch.bool:
        raise RouterError(
            "these are no expert ids",
            where=_place(replay),
            expected="a tensor of integers, [rows, topk]",
            got=f"{ids.dtype} {list(ids.shape)}" if is_tensor else ids,
        )
