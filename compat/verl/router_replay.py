"""verl's RouterReplay, of which there is one a router: the same face, over npu_replay's sessions.

verl's own keeps a list of all that were ever made, a queue of targets for the backward, and what was recorded
last. Here it holds nothing but its router: the pass that runs knows what is on.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from npu_replay.compat.megatron_backports.router_replay import AnotherNumber
from npu_replay.compat.verl import live_models
from npu_replay.compat.verl.engine_pass import BACKWARD, RECORD, REPLAY, current
from npu_replay.errors import RouterError
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.sessions.record import StepRecording
from npu_replay.sessions.replay import StepReplay

PATCH = "verl.utils.megatron.router_replay_patch"
_made: WeakKeyDictionary[nn.Module, RouterReplay] = WeakKeyDictionary()


class _Live(type):
    @property
    def router_instances(cls) -> list[RouterReplay]:
        """One for each live router that asks for replay, as they were made; a new list each time."""
        return [RouterReplay.of(router) for router in live_models.routers()]


def _no_router() -> None:
    """Stands for the router of a RouterReplay that was made by hand."""


class RouterReplay(metaclass=_Live):
    """One router's replay. Ask `RouterReplay.of(router)`, or the router: one made by hand belongs to none.

    It is also what Megatron's own API reaches while verl's replay is on, so it has that one's methods too.
    What is set on one router holds for all, as verl uses it.
    """

    npu_replay_by_session = True
    """The session that it opens answers the router's top-k; nobody else has to."""

    def __init__(self, router: nn.Module | None = None) -> None:
        self._router = _no_router if router is None else weakref.ref(router)
        self.layer_number: int | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        router = self._router()  # a copy's belongs to the router's copy
        return (RouterReplay, ()) if router is None else (RouterReplay.of, (router,))

    @classmethod
    def of(cls, router: nn.Module) -> RouterReplay:
        """The one of this router."""
        if router not in _made:
            _made[router] = cls(router)
        return _made[router]

    @property
    def router_replay_action(self) -> Any:
        """verl's action, or None."""
        module: Any = sys.modules.get(PATCH)
        known = [] if module is None else module.RouterReplayAction
        return next((action for action in known if action.value == current().action), None)

    @property
    def recorded_topk_idx(self) -> torch.Tensor | None:
        """What was recorded in this router's last call, int64 [rows, topk]."""
        running, router = current(), self._router()
        found = None if router is None else running.last.get(router)
        for session in running.sessions:
            for one in session.all_routers:
                if one.module is router and isinstance(session, StepRecording):
                    found = session.last(one)
        return None if found is None else found.long()

    def get_recorded_indices(self) -> torch.Tensor | None:
        """The same."""
        return self.recorded_topk_idx

    def set_target_indices(self, topk_indices: torch.Tensor, replay_mask: torch.Tensor | None = None) -> None:
        """The ids of this router's next forward, [rows, topk]; where the mask is False it chooses itself."""
        router, running = self._router(), current()
        if router is None:
            raise RouterError(
                "this RouterReplay has no router", expected="a live router's", got="a target for none"
            )
        running.targets[id(router)] = topk_indices, replay_mask
        for session in running.sessions:
            for chunk, routers in enumerate(session.routers):
                if not isinstance(session, StepReplay) or all(one.module is not router for one in routers):
                    continue
                if all(id(one.module) in running.targets for one in routers):  # all of this chunk
                    given = [running.targets.pop(id(one.module)) for one in routers]
                    masks = [mask.reshape(-1).bool().cpu() for _, mask in given if mask is not None]
                    routes = RoutedExperts(
                        ids=torch.stack([ids.cpu() for ids, _ in given], dim=1),
                        layers=[one.label for one in routers],
                        num_experts=routers[0].num_experts,
                        recorded=torch.stack(masks).all(dim=0) if masks else None,
                    )
                    session.give(chunk, routes)
                return
        raise RouterError(
            "this router is in no open replay",
            expected="set_global_router_replay_action(REPLAY_FORWARD) before its target is set",
            got=f"action {running.action or None}",
        )

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> Any:
        """The router's own top-k, which a session answers: Megatron-core from 0.16 on asks in each call."""
        return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

    def set_static_buffer(self, buffer: torch.Tensor) -> None:
        """Megatron's inference records into buffers, which a session has none of.

        Raises:
            RouterError: always.
        """
        raise RouterError(
            "routes are recorded into no static buffer while verl's replay is on",
            expected="verl's own record, or Megatron's inference in a process without verl's replay",
            got=f"a buffer of {list(buffer.shape)}",
        )

    def clear_static_buffer(self) -> None:
        """There is none."""

    @staticmethod
    def set_replay_data(all_layers_topk_indices: list[torch.Tensor]) -> None:
        """Targets of all routers, in their order."""
        routers = RouterReplay.router_instances
        if len(all_layers_topk_indices) != len(routers):
            raise AnotherNumber(
                "another number of replay tensors than routers",
                expected=len(routers),
                got=len(all_layers_topk_indices),
            )
        for router, ids in zip(routers, all_layers_topk_indices, strict=True):
            router.set_target_indices(ids)

    @staticmethod
    def get_recorded_data() -> list[torch.Tensor | None]:
        """What was recorded in the last call of each router, in their order."""
        return [router.recorded_topk_idx for router in RouterReplay.router_instances]

    @staticmethod
    def set_global_router_replay_action(router_replay_action: Any) -> None:
        """Begin a record or a replay. The action is of verl's enum, Megatron's or another with their values.

        Raises:
            RouterError: no such action.
        """
        value = getattr(router_replay_action, "value", None)
        if value not in (RECORD, REPLAY, BACKWARD):
            raise RouterError(
                "this is no action of a RouterReplay",
                expected="RouterReplayAction.RECORD, REPLAY_FORWARD or REPLAY_BACKWARD; "
                "clear_..._action() for none",
                got=router_replay_action,
            )
        current().set(value)

    @staticmethod
    def clear_global_router_replay_action() -> None:
        """End it.

        Raises:
            ReplayError: where no engine runs it: what was done isn't complete, or had no effect.
        """
        current().clear()

    @staticmethod
    def clear_global_indices() -> None:
        """Forget what was recorded, and targets that were not used yet."""
        current().forget()

    set_router_replay_action = set_global_router_replay_action
    clear_router_replay_action = clear_global_router_replay_action
    clear_indices = clear_global_indices
