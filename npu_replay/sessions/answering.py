"""Answer the top-k of each router, in forwards and in recomputes.

A model has up to a hundred routers, and an accelerator waits for the host's work around each. So what the
calls of one router share is computed when the block opens, and what a micro-batch shares when it begins.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from npu_replay.errors import RecomputeError, micro_batch
from npu_replay.routers import Router
from npu_replay.routes.host_copies import Count
from npu_replay.routes.inputs import copied
from npu_replay.seam import torch_state
from npu_replay.seam.call import Call
from npu_replay.seam.guarded import guard
from npu_replay.seam.quick_call import FEW
from npu_replay.sessions import effect
from npu_replay.sessions.micro_batch import Key, MicroBatch, is_due
from npu_replay.sessions.router_calls import RouterCalls, Shared
from npu_replay.sessions.session import Session, Work

if TYPE_CHECKING:
    from npu_replay.sessions.own_choice import OwnChoice
    from npu_replay.sessions.route_source import DeviceRoutes, Given, RouteSource


class Answering(Work):
    """Answers the top-k of every router of a model, in each forward and in its recompute.

    Args:
        source: decides which routes each forward gets.
        own: asks for the routers' own choice where ids are given; None where the source gives none.
        lasts: the block may last for a whole training run.

    Attributes:
        shared: what the calls of all routers share.
    """

    answers_topk = True

    def __init__(self, source: RouteSource, own: OwnChoice | None = None, *, lasts: bool = False) -> None:
        self.shared = Shared(source, own)
        self.puts_together = source.records or own is not None
        self.kept: dict[Key, MicroBatch] = {}  # whose ids are needed, for a recompute or a record
        self._dropped = Count()  # chosen experts that lost the token, over their capacity
        self._chosen = 0  # experts that were chosen in these outputs
        self._lasts = lasts
        self._calls: list[list[RouterCalls]] = []  # by chunk
        # By chunk, the devices of its routers in the last forward.
        self._devices: dict[int, tuple[torch.device, ...]] = {}

    # The block

    def enters(self, session: Session) -> None:
        self._calls = [[] for _ in session.routers]
        self.shared.source.enters(session)
        if self.shared.own is not None:
            self.shared.own.enters(session.all_routers)
        undo = session.undo
        undo.callback(torch_state.let_go, undo)
        paths = [[router.path for router in chunk_routers] for chunk_routers in session.routers]
        torch_state.hold_eager(session.chunks, paths, undo)
        undo.callback(guard.remove, undo)
        guard.install(undo)

    def attach(self, session: Session, router: Router, chunk: int) -> None:
        calls = RouterCalls(self.shared, session.errors, router, session.marks[chunk])
        self._calls[chunk].append(calls)
        session.undo.callback(calls.take_off)
        calls.put_on()
        if self.shared.own is not None and (handle := self.shared.own.recount(router, calls)) is not None:
            session.undo.callback(handle.remove)

    def check_complete(self) -> None:
        self.shared.checks.read(wait=True)
        due = self._due()
        if due:
            gc.collect()  # a graph in a reference cycle may be garbage already
            due = self._due()
        if due:
            number, layer = min(due)
            raise RecomputeError(
                f"the block ended before {len(due)} router calls were recomputed; they would choose anew",
                where=micro_batch(number, layer),
                expected="backward inside the block",
                got="a graph whose backward has not run",
                cause=(
                    "loss.backward() after the with block; a loss that was skipped (NaN, say) and is still "
                    "held: `del loss` inside the block; or outputs of a forward that lacks torch.no_grad()"
                ),
            )
        self.shared.source.check_complete()

    def _due(self) -> list[tuple[int, int]]:
        """Return micro-batch and layer of each call that autograd may still recompute and hasn't."""
        return [
            (forward.number, label)
            for forward in self.kept.values()
            for label in forward.may_run_again()
            if label not in forward.ran
        ]

    def clear(self) -> None:
        self._calls.clear()
        self.kept.clear()
        self.shared.checks.clear()
        self.shared.source.clear()

    def counts(self) -> dict[str, int]:
        """Return microseconds spent, chosen experts, those that lost their token, and the counts of `own`."""
        figures = {"microseconds": int(self.shared.seconds * 1e6)}
        figures |= {"dropped": int(self._dropped), "chosen": self._chosen}
        return figures if self.shared.own is None else figures | self.shared.own.counts()

    # Its forwards

    def _is_checked(self, number: int) -> bool:
        return is_due(number) or self.shared.source.is_last(number)

    def begins(self, begun: MicroBatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with self.shared.timed():
            source = self.shared.source
            own = self.shared.own
            self._let_go()
            self.shared.checks.read(wait=False)
            chunk = source.chunks[begun.chunk]
            begun.checked = self._is_checked(begun.number)
            source.check_forward(begun)
            wanted = begun.chunk == 0 and source.wants_inputs_of(begun.number)
            if wanted and (called := copied(args, kwargs, chunk)) is not None:
                source.inputs[begun.number] = called if source.records else called.leaving()
            device_routes = source.given.get(begun.key)
            if own is not None:
                own.check_losses(chunk, args, kwargs)
                own.begins(begun, chunk, device_routes, source.knows_tokens(begun.number))
            if device_routes is not None:
                for device in self._devices.get(begun.chunk, ()):
                    source.send(begun, device)
            self._prepare(begun, device_routes)

    def _prepare(self, begun: MicroBatch, device_routes: DeviceRoutes | None) -> None:
        """Make the routers' calls, unless a closer look is needed or the routes aren't on a device yet."""
        if begun.checked or torch.is_inference_mode_enabled():
            return
        routes: Given | None = None
        direct: Mapping[int, torch.Tensor] = {}
        if self.shared.own is not None:
            if device_routes is None or len(device_routes.on) != 1:
                return
            (routes,) = device_routes.on.values()
            begun.rows = device_routes.rows
            if routes.wide is not None and routes.missing is None and not begun.compares:
                direct = routes.by_layer
        for calls in self._calls[begun.chunk]:
            calls.prepare(begun, routes, direct.get(calls.label))

    def ends(self, ended: MicroBatch) -> None:
        with self.shared.timed():
            source = self.shared.source
            own = self.shared.own
            device_routes = source.given.get(ended.key)
            try:
                if ended.has_raised:
                    if ended.chunk == 0:
                        source.inputs.pop(ended.number, None)
                else:
                    self._keep(ended, device_routes)
                    self._check(ended, device_routes)
                source.ends(ended)  # says more of wrong rows than the routers' own choice does
                if own is not None and not ended.has_raised:
                    own.ends(ended, device_routes)
            finally:
                ended.forget_calls()
                if device_routes is not None:
                    self._devices[ended.chunk] = tuple(device_routes.on)
                    # A router may have written into the ids; those for a recompute are kept.
                    device_routes.on.clear()
            self._let_go()

    def _keep(self, ended: MicroBatch, device_routes: DeviceRoutes | None) -> None:
        """Keep the ids of the calls that need it, and add the checks of quick calls; few ids are stacked."""
        records = self.shared.source.records
        kept: list[Call] = []
        shown: list[Call] = []
        for call in ended.calls.values():
            if (records or call.around) and call.has_ended and ended.keep(call):
                kept.append(call)
            # The tensor that the router was given shows the ids: nobody has written into it.
            if call.shown is not None and call.shown is not call.handed:
                shown.append(call)
        if ended.around or records:
            self.kept[ended.key] = ended
        ids = None
        if shown:
            ids = _stacked(shown, device_routes)
            ended.checks.extend(effect.of_quick_calls(shown, ids))
        if kept:
            ended.keep_ids(kept, ids if kept == shown else _stacked(kept, None))

    def _check(self, ended: MicroBatch, device_routes: DeviceRoutes | None) -> None:
        """Check what the routers of a forward have shown, as far as it has come to the host."""
        chunk_routers = self.shared.source.routers[ended.chunk]
        for routes in () if device_routes is None else device_routes.on.values():
            if (untouched := routes.untouched()) is not None:
                ended.checks.append(effect.of_given(chunk_routers, ended, untouched))
        effect.refuse_wrong_calls(ended, chunk_routers)
        self.shared.checks.add(ended.checks)
        self.shared.checks.read(wait=False)
        for unshown in ended.unshown:
            self._dropped.add(unshown)
            self._chosen += unshown.numel()

    def _let_go(self) -> None:
        """Drop the ids of micro-batches that autograd can't run again, unless they are recorded."""
        keeps = self.shared.source.keeps
        timeline = self.shared.source.timeline
        for key, forward in list(self.kept.items()):
            is_recorded = keeps is None or forward.number >= timeline.ended[forward.chunk] - keeps
            if not is_recorded and next(forward.may_run_again(), None) is None:
                forward.let_go()
                del self.kept[key]
        if self._lasts:
            timeline.forget(next(iter(self.kept.values()), None))


def _stacked(calls: Sequence[Call], device_routes: DeviceRoutes | None) -> torch.Tensor | None:
    """Return the ids of calls, int64 [calls, rows, topk]; None if they are many, or of several shapes."""
    for routes in () if device_routes is None else device_routes.on.values():
        if routes.wide is not None and routes.missing is None and len(calls) == len(routes.wide):
            labels = [call.owner.label for call in calls]
            if labels == list(routes.by_layer) and all(call.ids is call.direct for call in calls):
                return routes.wide  # the routers got these themselves
    if calls[0].ids.numel() > FEW:
        return None
    try:
        return torch.stack([call.ids for call in calls])
    except RuntimeError:  # of several shapes, or on several devices
        return None
