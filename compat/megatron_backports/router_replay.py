"""Megatron-core's RouterReplay for the releases that lack it, 0.12 to 0.15: one for each replayed router.

The same face and meaning as upstream's `megatron.core.transformer.moe.router_replay` of 0.19, which is served
under that name (`install`). Only how a router comes to ask differs: there its own code calls
`get_replay_topk`, here its top-k does, through the seam (`Asked`).

As upstream's, it goes by a global action and by a queue of targets for recomputes, which is right as long
as backward visits the micro-batches in the order of their forwards; `npu_replay.record` and `replay` need
neither. Where upstream's goes on in silence, or stops with an AttributeError of None, this says why.

Asks:     whether the release has the module.
Changes:  nothing of Megatron's; the module can be imported. `torch.topk` asks while `asked` is open.
Undone:   the module is taken away.
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any

import torch
from torch import nn

from npu_replay.compat.megatron import fused_router
from npu_replay.compat.megatron.routers import action_of, is_replaying
from npu_replay.compat.patching import import_hook
from npu_replay.errors import NoEffect, ReplayError, RouterError
from npu_replay.sessions import seam

MODULE = "megatron.core.transformer.moe.router_replay"

Topk = Callable[..., "tuple[torch.Tensor, torch.Tensor]"]
"""(scores, topk, num_groups, group_topk) -> (values, ids), each [rows, topk]."""


def install() -> None:
    """Let the module be imported where this Megatron-core hasn't got it."""

    def fill(module: Any) -> None:
        module.__doc__ = __doc__
        module.RouterReplay, module.RouterReplayAction = MegatronRouterReplay, RouterReplayAction

    why = "RouterReplay, as from Megatron-core 0.16 on"
    import_hook.serve(MODULE, fill, why, reason="upstream's routing replay API")


class AnotherNumber(ReplayError, ValueError, AssertionError):
    """As many layers as routers were expected; also what upstream raises there."""


class NoTarget(RouterError, IndexError):
    """A replay without ids that fit; also what upstream raises where its queue is empty."""


class RouterReplayAction(Enum):
    """What a router's top-k does."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    """Use the target that was set last."""
    REPLAY_BACKWARD = "replay_backward"
    """Use the oldest target that no recompute has used yet."""


class MegatronRouterReplay:
    """Records or replays the expert ids of one router, int [rows, topk], rows as the router has them.

    Loops import it as Megatron's `RouterReplay`.

    >>> from npu_replay.compat.megatron_backports.router_replay import *
    >>> replay = MegatronRouterReplay()
    >>> replay.set_target_indices(torch.tensor([[2, 0]]))
    >>> replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    >>> replay.get_replay_topk(torch.tensor([[0.1, 0.6, 0.3]]), topk=2)
    (tensor([[0.3000, 0.1000]]), tensor([[2, 0]]))
    >>> replay.global_router_replay_instances.remove(replay)

    Attributes:
        global_router_replay_instances: all of them, in the order of their making. One that belongs to a
            router goes when the router is garbage: a model that was built and thrown away shifts nothing.
        target_topk_idx: what the next REPLAY_FORWARD uses.
        recorded_topk_idx: the ids of the last call under RECORD; a view of the static buffer, if one is set.
        router_replay_action: None for the router's own choice.
        replay_backward_list: targets for REPLAY_BACKWARD, oldest first.
        static_buffer: int [max_rows, topk], recorded ids are copied into its first rows.
        layer_number: of its router, from 1 on; None without one.
    """

    global_router_replay_instances: list[MegatronRouterReplay] = []  # noqa: RUF012  upstream's name and kind

    def __init__(self) -> None:
        self.target_topk_idx: torch.Tensor | None = None
        self.recorded_topk_idx: torch.Tensor | None = None
        self.router_replay_action: RouterReplayAction | None = None
        self.replay_backward_list: list[torch.Tensor] = []
        self.static_buffer: torch.Tensor | None = None
        self.layer_number: int | None = None
        _everyone().append(self)

    # All of them

    @staticmethod
    def set_replay_data(all_layers_topk_indices: list[torch.Tensor]) -> None:
        """Set every router's target, in the order of their making.

        Raises:
            ValueError: another number of tensors than routers.
            RouterError: one is no tensor of ids; then no router has got its own.
        """
        _check_count(len(all_layers_topk_indices), "tensors")
        pairs = list(zip(_everyone(), all_layers_topk_indices, strict=True))
        for replay, ids in pairs:
            _check_ids(ids, replay)  # a framework's own may be among them
        for replay, ids in pairs:
            replay.set_target_indices(ids)

    @staticmethod
    def get_recorded_data() -> list[torch.Tensor | None]:
        """What each router recorded last."""
        return [replay.get_recorded_indices() for replay in _everyone()]

    @staticmethod
    def clear_global_indices() -> None:
        """Forget what was recorded, and all targets."""
        for replay in _everyone():
            replay.clear_indices()

    @staticmethod
    def set_global_router_replay_action(router_replay_action: RouterReplayAction) -> None:
        """Set every router's action."""
        for replay in _everyone():
            replay.set_router_replay_action(router_replay_action)

    @staticmethod
    def clear_global_router_replay_action() -> None:
        """Let every router choose itself."""
        for replay in _everyone():
            replay.clear_router_replay_action()

    @staticmethod
    def clear_global_router_replay_instances() -> None:
        """Forget all of them; they go on working one by one."""
        _everyone().clear()

    @staticmethod
    def set_global_static_buffers(static_buffer: torch.Tensor) -> None:
        """Give every router its slice of a buffer, int [max_rows, routers, topk].

        Raises:
            AssertionError: another number of layers in it than routers.
        """
        _check_count(static_buffer.shape[1], "layers in the buffer")
        for layer, replay in enumerate(_everyone()):
            replay.set_static_buffer(static_buffer[:, layer, :])

    @staticmethod
    def clear_global_static_buffers() -> None:
        """Take the buffers away."""
        for replay in _everyone():
            replay.clear_static_buffer()

    # One

    def set_target_indices(self, topk_indices: Any) -> None:
        """Set the ids of this router's next forward, int [rows, topk], and queue them for its recompute.

        Raises:
            RouterError: no two-dimensional tensor of integers.
        """
        _check_ids(topk_indices, self)
        self.target_topk_idx = topk_indices
        self.replay_backward_list.append(topk_indices)

    def get_recorded_indices(self) -> torch.Tensor | None:
        """The ids of the last call under RECORD, int64 [rows, topk]."""
        return self.recorded_topk_idx

    def record_indices(self, topk_indices: torch.Tensor) -> None:
        """Take ids down; into the static buffer, if one is set."""
        if self.static_buffer is not None:
            place = self.static_buffer[: len(topk_indices)]
            if place.shape != topk_indices.shape:
                raise RouterError(
                    "the static buffer doesn't fit what is recorded",
                    where=_place(self),
                    expected=f"at least {list(topk_indices.shape)}",
                    got=list(self.static_buffer.shape),
                )
            place.copy_(topk_indices)
            topk_indices = place
        self.recorded_topk_idx = topk_indices

    def clear_indices(self) -> None:
        """Forget what was recorded, and all targets."""
        self.recorded_topk_idx = self.target_topk_idx = None
        self.replay_backward_list = []

    def set_router_replay_action(self, router_replay_action: RouterReplayAction) -> None:
        """Set this router's action; one of a framework's own enum that means the same will do.

        Raises:
            RouterError: no such action.
        """
        action: Any = router_replay_action
        try:
            found = None if action is None else RouterReplayAction(getattr(action, "value", action))
        except ValueError:
            raise RouterError(
                "this is no action of a RouterReplay",
                where=_place(self),
                expected="RouterReplayAction." + ", ".join(one.name for one in RouterReplayAction),
                got=action,
            ) from None
        self.router_replay_action = found

    def clear_router_replay_action(self) -> None:
        """Let this router choose itself."""
        self.router_replay_action = None

    def set_static_buffer(self, buffer: torch.Tensor) -> None:
        """Copy what is recorded into this, int [max_rows, topk]."""
        self.static_buffer = buffer

    def clear_static_buffer(self) -> None:
        """Record without a buffer."""
        self.static_buffer = None

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Topk | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The router's top-k under its action: values and int64 ids, [rows, topk] each.

        Args:
            scores: float [rows, experts].
            default_compute_topk: the router's own, which is given the groups.

        Raises:
            NoTarget: a replay without a target, or with one of another shape.
        """
        if is_replaying(self):
            ids = self._target(len(scores), topk).to(scores.device, torch.int64)
            call = seam.armed()
            if isinstance(call, Asked) and call.replay is self:
                # A routing that asks by itself, as upstream's, is answered here: its top-k won't come.
                call.ids, call.way = ids, "inner"
            return scores.gather(1, ids), ids
        if default_compute_topk is None:
            problem, expected = "there is no top-k to ask", "default_compute_topk"
            raise RouterError(problem, where=_place(self), expected=expected, got=None)
        values, ids = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.router_replay_action is RouterReplayAction.RECORD:
            self.record_indices(ids)
        return values, ids

    def _target(self, rows: int, topk: int) -> torch.Tensor:
        """Take the ids of a replayed call; a framework's own may keep them elsewhere."""
        backward = self.router_replay_action is RouterReplayAction.REPLAY_BACKWARD
        if backward:
            ids = self.replay_backward_list.pop(0) if self.replay_backward_list else None
        else:
            ids = self.target_topk_idx
        if ids is None or ids.shape != (rows, topk):
            raise NoTarget(
                f"{self.router_replay_action} has no ids for this call of the router",
                where=_place(self),
                expected=f"targets of shape {[rows, topk]}",
                got="none" if ids is None else list(ids.shape),
                cause="more recomputes than targets since clear_global_indices(), or a backward that doesn't "
                "go through the micro-batches in the order of their forwards"
                if backward
                else "set_replay_data() was not called before this forward, or with ids of another",
            )
        return ids


def is_idle(replay: Any) -> bool:
    """Would asking it change nothing? Upstream asks in every call, and a framework may have wrapped that."""
    ask = getattr(replay, "get_replay_topk", None)
    if ask is None:
        return True  # none, or a framework's own, whose routing knows what to do with it
    # Upstream's own method, and ours, look names up in the module that they were made in; a wrapper or a
    # framework's own, wherever it lies and whatever it is called, looks them up elsewhere.
    names, product = getattr(ask, "__globals__", None), sys.modules.get(MODULE)
    plain = names is globals() or (product is not None and names is vars(product))
    return plain and action_of(replay) is None


class Asked(seam.Call):
    """A call of a router whose top-k asks a RouterReplay, which may be a framework's own or a subclass.

    Args:
        replay: has `get_replay_topk`, as upstream's.
        groups: how many, and of how many experts are taken; passed on to `replay`.
        compares: also find the router's own choice.
    """

    def __init__(
        self,
        replay: Any,
        rows: int,
        num_experts: int,
        topk: int,
        *,
        groups: tuple[int | None, int | None] = (None, None),
        compares: bool = False,
        spare: int = 0,
    ) -> None:
        super().__init__(
            rows,
            num_experts,
            topk,
            seam.Call.own,
            masks=bool(groups[1]),
            watch=True,  # it sees the masking of groups, and a top-k that was imported by name
            given=is_replaying(replay),
        )
        self.drops = True  # a further top-k of the same scores is an aux loss's, and counts the live choice
        self.spare, self.replay, self._compares, self._groups = spare, replay, compares, groups

    def decide(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outer = self.outer

        def own(*_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
            """As it was asked: of scores masked by groups; a block around is asked too, for once."""
            if outer is not None and outer.ids is None:
                outer.made = self.made
                seam.arm(outer)
            try:
                values, ids = torch.topk(scores, *self.asked[0], **self.asked[1])
            finally:
                seam.arm(None)
            return values[:, : self.topk], ids[:, : self.topk]

        if self._compares:
            self.own()
        values, ids = self.replay.get_replay_topk(self.unmasked(scores), self.topk, *self._groups, own)
        if isinstance(outer, Asked) and outer.replay is self.replay:
            outer.ids, outer.way = ids, "inner"  # this one was armed by a routing that knows of it
        return values, ids

    def note(self, ids: torch.Tensor) -> None:
        """A fused call has chosen: have it recorded."""
        none = ids.new_empty(len(ids), 0, dtype=torch.float32)
        self.replay.get_replay_topk(none, self.topk, *self._groups, lambda *_, **__: (ids, ids))
        super().note(ids)


@contextlib.contextmanager
def asked(call: Asked, *, fused: bool = False) -> Iterator[None]:
    """Let the next top-k of this thread that fits be answered; there has to be one.

    Args:
        fused: is the router's kernel asked, too?

    Raises:
        NoEffect: there was none.
    """
    kernel = fused_router.HeldKernel() if fused else None
    seam.guard.install(call)
    call.begin()
    try:
        yield
    finally:
        call.end()
        seam.guard.remove(call)
        if kernel is not None:
            kernel.remove()
    if call.ids is None and action_of(call.replay) is not None:
        raise NoEffect(
            "RouterReplay has an action, and this router calls no top-k that could ask it",
            expected=f"a top-{call.topk} over {call.num_experts} experts",
            got=", ".join(dict.fromkeys(call.seen)) or "nothing",
            cause="a selection that is made without torch.topk: by a hash, by a kernel, or in turn",
        )


def _everyone() -> list[MegatronRouterReplay]:
    return MegatronRouterReplay.global_router_replay_instances


def leave(replay: Any, kind: Any) -> None:
    """Take one out of the list of all that a class keeps: upstream's, or ours."""
    everyone = kind.global_router_replay_instances
    everyone[:] = [one for one in everyone if one is not replay]


def leave_with(router: nn.Module, replay: Any, kind: Any) -> None:
    """The same, when its router is garbage."""
    dead = weakref.ref(replay)
    weakref.finalize(router, lambda: leave(dead(), kind)).atexit = False


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


def _check_count(got: int, of: str) -> None:
    if got != len(_everyone()):
        raise AnotherNumber(
            f"another number of {of} than of routers with a replay",
            expected=len(_everyone()),
            got=got,
            cause="layers of another pipeline stage, or a second model in this process with the flag",
        )
