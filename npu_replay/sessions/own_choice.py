"""Ask routers for their own choice during a replay: for live_mismatch, overlap and aux losses."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from npu_replay import environment
from npu_replay.errors import one_of
from npu_replay.routers import Handle, Router, check_losses
from npu_replay.routes.inputs import parameter_names
from npu_replay.sessions import seam
from npu_replay.sessions.effect import Count
from npu_replay.sessions.micro_batches import Forward
from npu_replay.sessions.overlap import OverlapCheck
from npu_replay.sessions.route_source import DeviceRoutes

AuxLoss: TypeAlias = Literal["live", "replayed"]


class OwnChoice:
    """Asks routers that are given ids for their own choice, if an option of `replay` needs it."""

    def __init__(
        self,
        *,
        live_mismatch: bool = False,
        min_overlap: float | None = None,
        aux_loss: AuxLoss | None = None,
    ) -> None:
        if aux_loss is not None:
            one_of(aux_loss, ("live", "replayed"), "aux_loss")
        self._aux_loss = environment.read(environment.AUX_LOSS, "live") if aux_loss is None else aux_loss
        self._counts_live = False
        self._overlap = OverlapCheck(min_overlap)
        self._is_compared = live_mismatch
        self._differing = Count()
        self._compared = 0
        self._running: list[tuple[torch.Tensor, int]] = []
        """Holds for each call in the running forward a flag for each row, and the number of compared rows."""

    def enters(self, routers: Sequence[Router]) -> None:
        losses = any(router.aux_losses is not None for router in routers)
        self._counts_live = losses and self._aux_loss == "live"

    def recount(self, router: Router, calls: object) -> Handle | None:
        """Make a router's aux losses count as `aux_loss` says in these calls; None if they do so already."""
        losses = router.aux_losses
        if losses is None or losses.follow == (self._aux_loss == "replayed"):
            return None
        return losses.recount(functools.partial(_counted, weakref.ref(calls), self._aux_loss))

    def check_losses(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse a call of the model with a loss that can't count the replayed experts as asked."""
        if self._aux_loss == "replayed":
            check_losses(module, dict(zip(parameter_names(module), args, strict=False)) | dict(kwargs))

    def count_in(self, call: seam.Call) -> None:
        """Find the router's own choice, if its aux losses count that in this call."""
        if not self._counts_live:
            return
        router = call.owner.router
        if (losses := router.aux_losses) is not None and losses.follow_the_call_of(router.module):
            call.own()

    def compare(
        self, call: seam.Call, given: torch.Tensor, missing: torch.Tensor | None, routes: DeviceRoutes
    ) -> None:
        """Compare the given ids, int64 [rows, topk], with the router's own; `missing` rows don't count."""
        self.count_in(call)
        if self._is_compared:
            differ = (given.sort(dim=1).values != call.own().sort(dim=1).values).any(dim=1)
            if missing is not None:
                differ[missing] = False
            self._running.append((differ, len(differ) - (0 if missing is None else len(missing))))
        if self._overlap.asks(call.forward, routes.routes):
            self._overlap.add(call.owner.label, call.num_experts, given, call.own(), missing)

    def ends(self, chunk: int, forward: Forward | None, given: DeviceRoutes | None) -> None:
        """Count and judge the calls of a forward, None if it raised; MicroBatchError for a low overlap."""
        shown, self._running = self._running, []
        for differ, compared in shown if forward is not None else ():
            self._differing.add(differ)
            self._compared += compared
        self._overlap.check(chunk, None if forward is None else forward.number, given)

    def counts(self) -> dict[str, int]:
        """Return numbers of token-layers, compared and differing, and of experts, judged and shared."""
        figures = {"differing": int(self._differing), "compared": self._compared}
        return figures | {"shared": self._overlap.shared, "given": self._overlap.given}


def _counted(calls: weakref.ref[Any], aux_loss: AuxLoss) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return the ids that the aux losses should count and those that the router uses; None outside a call."""
    owner = calls()
    call = None if owner is None else seam.running(owner)
    if call is None or call.ids is None:
        return None
    counted = call.ids if aux_loss == "replayed" else call.own_ids
    return None if counted is None else (counted, call.ids)
