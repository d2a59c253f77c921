"""Answer the top-k of each router, in forwards and in recomputes.

A model has up to a hundred routers, and an accelerator waits for the host's work around each. So what the
calls of one router share is computed when the block opens, and what a micro-batch shares when it begins.

State is kept by (layer, micro-batch), never appended to a list: a forward that is retried after an
exception, and recomputes in any order, find their own entries.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any

import torch

from npu_replay import routers
from npu_replay.errors import NoEffect, RecomputeError, micro_batch
from npu_replay.routers import Router
from npu_replay.routes.inputs import copied
from npu_replay.sessions import seam, torch_state
from npu_replay.sessions.effect import is_due
from npu_replay.sessions.micro_batches import (
    Forward,
    Key,
    Marks,
    Timeline,
)
from npu_replay.sessions.own_choice import OwnChoice
from npu_replay.sessions.quick_call import Begins, Ends, QuickCall
from npu_replay.sessions.route_source import Given, RouteSource
from npu_replay.sessions.router_calls import RouterCalls, Shared
from npu_replay.sessions.session import Session, Undo, Work
from npu_replay.sessions.torch_state import restore_functions


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

    def __init__(
        self,
        source: RouteSource,
        own: OwnChoice | None = None,
        *,
        lasts: bool = False,
        puts_together: bool = True,
    ) -> None:
        self.shared = Shared(source, own)
        self.puts_together = puts_together
        self.timeline = Timeline(0)
        self._lasts = lasts
        self._calls: list[list[RouterCalls]] = []  # by chunk
        self._chunk_of: dict[int, int] = {}
        # By chunk, the devices of its routers in the last forward.
        self._devices: dict[int, tuple[torch.device, ...]] = {}
        self._undo: Undo | None = None

    # The block

    def enters(self, session: Session) -> None:
        self.timeline = session.timeline
        self._unchanged = session.unchanged
        self._chunk_of = {one.label: at for at, found in enumerate(session.routers) for one in found}
        self._calls = [[] for _ in session.routers]
        self.shared.source.enters(session)
        if self.shared.own is not None:
            self.shared.own.enters(session.all_routers)
        self._undo = undo = session.undo
        undo.callback(torch_state.let_go, undo)
        paths = [[router.path for router in found] for found in session.routers]
        torch_state.hold_eager(session.chunks, paths, undo)
        undo.callback(seam.guard.remove, undo)
        seam.guard.install(undo)
        undo.callback(seam.unwind, undo)
        undo.callback(restore_functions, torch._C._is_torch_function_enabled())
        for name, owner, attribute in routers.functions(session.all_routers):
            session.unchanged.hold(name, vars(owner), attribute)

    def attach(self, session: Session, router: Router, chunk: int, marks: Marks) -> None:
        calls = RouterCalls(self.shared, session, router, chunk, marks)
        self._calls[chunk].append(calls)
        begins = session.may_wait(RouterCalls.begins)
        ends = session.may_wait(RouterCalls.ends)
        session.before(router.module, Begins(calls, begins, router.module))
        calls.last = Ends(calls, ends, router.module)
        session.after(router.module, calls.last)
        if self.shared.own is not None and (handle := self.shared.own.recount(router, calls)) is not None:
            session.undo.callback(handle.remove)

    def check_complete(self) -> None:
        self.shared.witness.read(wait=True)
        due = self.shared.recomputes.due()
        if due:
            gc.collect()  # a graph in a reference cycle may be garbage already
            due = self.shared.recomputes.due()
        if due:
            layer, number = min(due, key=lambda key: (key[1], key[0]))
            problem = (
                f"the block ended before {len(due)} router calls were recomputed; they would choose anew"
            )
            expected = "backward inside the block"
            got = "a graph whose backward has not run"
            cause = (
                "loss.backward() after the with block; a loss that was skipped (NaN, say) and is still held: "
                "`del loss` inside the block; or outputs of a forward that lacks torch.no_grad()"
            )
            where = micro_batch(number, layer)
            raise RecomputeError(problem, where=where, expected=expected, got=got, cause=cause)
        self.shared.source.check_complete()

    def clear(self) -> None:
        self._calls.clear()
        self.shared.clear()

    def counts(self) -> dict[str, int]:
        """Return microseconds spent, chosen experts, those that lost their token, and the counts of `own`."""
        figures = {"microseconds": int(self.shared.seconds * 1e6)}
        figures |= {"dropped": int(self.shared.witness.dropped), "chosen": self.shared.witness.chosen}
        return figures if self.shared.own is None else figures | self.shared.own.counts()

    # Its forwards

    def comes(self, chunk: int) -> None:
        if self.shared.own is not None:
            self.shared.own.ends(chunk, None, None)  # drop what an interrupted forward left
        if seam.is_running():
            seam.unwind(self._undo)
        self.shared.recomputes.settle(self._release)
        if (left := self.timeline.running(chunk)) is not None:  # an interrupt runs no forward hook
            self._abandon(left)
        self.shared.witness.read(wait=False)

    def trusts(self, number: int) -> bool:
        # A recompute is run by what is in place then, and its results may not tell.
        return not (self._is_checked(number) or self.shared.recomputes.any)

    def _is_checked(self, number: int) -> bool:
        return is_due(number) or self.shared.source.is_last(number)

    def begins(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        started = time.perf_counter()
        number = forward.number
        source = self.shared.source
        chunk = source.chunks[forward.chunk]
        forward.checked = self._is_checked(number)
        source.check_forward(forward)
        wanted = forward.chunk == 0 and source.wants_inputs_of(number)
        if wanted and (called := copied(args, kwargs, chunk)) is not None:
            source.inputs[number] = called if source.records else called.leaving()
        given = source.given.get((forward.chunk, number))
        if self.shared.own is not None:
            self.shared.own.check_losses(chunk, args, kwargs)
            self.shared.own.begins(forward, chunk, given, source.knows_tokens(number))
            forward.compares = self.shared.own.compares(forward)
        if given is not None:
            for device in self._devices.get(forward.chunk, ()):
                source.send(forward, device)
        forward.quick = not (forward.checked or torch.is_inference_mode_enabled())
        if forward.quick and self.shared.own is not None:
            forward.quick = given is not None and len(given.on) == 1
        if forward.quick and given is not None:
            forward.given = next(iter(given.on.values()))
            forward.rows = given.rows
        if forward.quick:
            self._prepare(forward)
        self.shared.seconds += time.perf_counter() - started

    def _prepare(self, forward: Forward) -> None:
        given: Given | None = forward.given
        direct: Mapping[int, torch.Tensor] = {}
        if given is not None and given.wide is not None and given.missing is None and not forward.compares:
            direct = given.by_layer
        for calls in self._calls[forward.chunk]:
            calls.prepare(forward, direct.get(calls.label))

    def _keep(self, forward: Forward) -> None:
        """Keep the ids of a forward's quick calls, those of a record together."""
        together: list[QuickCall] = []
        for call in forward.ended:
            if type(call) is not QuickCall:
                continue
            if call.around or call.given:
                call.owner.keep(call)
            else:
                together.append(call)
        if self.shared.source.records and together:
            keys = [(call.owner.label, forward.number) for call in together]
            self.shared.kept.keep_all(keys, [call.ids for call in together], together[0].owner.narrow)

    def ends(self, forward: Forward, complete: bool, output: object) -> bool:
        started = time.perf_counter()
        chunk = forward.chunk
        source = self.shared.source
        self.shared.recomputes.settle(self._release)
        given = source.given.get((chunk, forward.number))
        if complete:
            self._keep(forward)
            on = [] if given is None else list(given.on.values())
            try:
                self.shared.witness.check(source.routers[chunk], forward, on)
            except NoEffect:
                # These say more: something was replaced, or routers share a buffer of ids.
                self._unchanged.check(micro_batch(forward.number))
                self.shared.kept.narrow()
                raise
        else:
            if chunk == 0:
                source.inputs.pop(forward.number, None)
            self._abandon(forward)
        if forward.checked:
            self.shared.kept.narrow()  # refuses routers that share a buffer
        else:
            self.shared.kept.narrow_many()
        if given is not None:
            self._devices[chunk] = tuple(given.on)
            given.on.clear()  # ids for a recompute are in `kept`
        if self.shared.own is not None:
            self.shared.own.ends(chunk, forward if complete else None, given)
        source.ends(forward, complete, self.shared.kept)
        if source.keeps is not None and len(self.shared.kept) > len(self.shared.recomputes):
            before = self.timeline.ended[chunk] - source.keeps
            for key in list(self.shared.kept):
                is_old = self._chunk_of[key[0]] == chunk and key[1] < before
                if is_old and key not in self.shared.recomputes:
                    self.shared.kept.drop(key)
        if self._lasts:
            oldest = next(iter(self.shared.recomputes), None)
            self.timeline.forget(None if oldest is None else (self._chunk_of[oldest[0]], oldest[1]))
        self.shared.seconds += time.perf_counter() - started
        return complete and bool(self.shared.recomputes)

    def _release(self, key: Key) -> None:
        if not self.shared.source.records:
            self.shared.kept.drop(key)

    def _abandon(self, forward: Forward) -> None:
        given = self.shared.source.given.get(forward.owner)
        if given is not None:
            given.on.clear()  # a router may have written into the ids
        for layer in forward.called | {call.owner.label for call in forward.ended}:
            key = layer, forward.number
            self.shared.witness.forget(key)
            self.shared.recomputes.drop(key)
            self.shared.kept.drop(key)
