"""Answer the top-k of each router, in forwards and in recomputes.

A model has up to a hundred routers, and an accelerator waits for the host's work around each. So what the
calls of one router share is computed when the block opens, and what a micro-batch shares when it begins.

State is kept by (layer, micro-batch), never appended to a list: a forward that is retried after an
exception, and recomputes in any order, find their own entries.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import torch

from npu_replay import routers
from npu_replay.errors import MicroBatchError, RecomputeError, RouterError, micro_batch
from npu_replay.routers import Router
from npu_replay.routes.inputs import copied
from npu_replay.routes.routed_experts import narrow_dtype
from npu_replay.sessions import backward, seam, torch_state
from npu_replay.sessions.effect import Witness, is_due
from npu_replay.sessions.masks import Steps
from npu_replay.sessions.micro_batches import (
    CALLED_INSIDE,
    FEW,
    Forward,
    KeptIds,
    Key,
    Marks,
    Recomputes,
    Timeline,
)
from npu_replay.sessions.own_choice import OwnChoice
from npu_replay.sessions.route_source import RouteSource, to_device
from npu_replay.sessions.session import Session, Undo, Work
from npu_replay.sessions.torch_state import Hook, caller_of_hook, restore_functions

_is_batched = torch._C._functorch.is_batchedtensor


class Answering(Work):
    """Answers the top-k of every router of a model, in each forward and in its recompute.

    Args:
        source: decides which routes each forward gets.
        own: asks for the routers' own choice where ids are given; None where the source gives none.
        lasts: the block may last for a whole training run.

    Attributes:
        kept: ids of calls.
        seconds: time spent here.
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
        self.source, self.own = source, own
        self.puts_together = puts_together
        self.kept = KeptIds()
        self.witness = Witness()
        self.recomputes = Recomputes()
        self.seconds = 0.0
        self.timeline = Timeline(0)
        self._lasts = lasts
        self._calls: list[RouterCalls] = []
        self._chunk_of: dict[int, int] = {}
        self._undo: Undo | None = None

    # The block

    def enters(self, session: Session) -> None:
        self.timeline = session.timeline
        self._chunk_of = {one.label: at for at, found in enumerate(session.routers) for one in found}
        self.source.enters(session)
        if self.own is not None:
            self.own.enters(session.all_routers)
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
        calls = RouterCalls(self, session, router, chunk, marks)
        self._calls.append(calls)
        session.before(router.module, Hook(calls, session.may_wait(RouterCalls.begins), router.module))
        calls.last = Hook(calls, session.may_wait(RouterCalls.ends), router.module)
        session.after(router.module, calls.last)
        if self.own is not None and (handle := self.own.recount(router, calls)) is not None:
            session.undo.callback(handle.remove)

    def check_complete(self) -> None:
        self.witness.check_ids()
        due = self.recomputes.due()
        if due:
            gc.collect()  # a graph in a reference cycle may be garbage already
            due = self.recomputes.due()
        if due:
            layer, number = min(due, key=lambda key: (key[1], key[0]))
            problem = (
                f"the block ended before {len(due)} router calls were recomputed; they would choose anew"
            )
            expected, got = "backward inside the block", "a graph whose backward has not run"
            cause = (
                "loss.backward() after the with block; a loss that was skipped (NaN, say) and is still held: "
                "`del loss` inside the block; or outputs of a forward that lacks torch.no_grad()"
            )
            where = micro_batch(number, layer)
            raise RecomputeError(problem, where=where, expected=expected, got=got, cause=cause)
        self.source.check_complete()

    def clear(self) -> None:
        for kept in (self._calls, self.witness, self.recomputes, self.kept, self.source):
            kept.clear()

    def counts(self) -> dict[str, int]:
        """Return microseconds spent, chosen experts, those that lost their token, and the counts of `own`."""
        figures = {"microseconds": int(self.seconds * 1e6)}
        figures |= {"dropped": int(self.witness.dropped), "chosen": self.witness.chosen}
        return figures if self.own is None else figures | self.own.counts()

    # Its forwards

    def comes(self, chunk: int) -> None:
        if self.own is not None:
            self.own.ends(chunk, None, None)  # drop what an interrupted forward left
        if seam.is_running():
            seam.unwind(self._undo)
        self.recomputes.settle(self._release)
        if (left := self.timeline.running(chunk)) is not None:  # an interrupt runs no forward hook
            self._abandon(left)
        self.witness.check_ids()

    def begins(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        number, source = forward.number, self.source
        chunk = source.chunks[forward.chunk]
        forward.checked = is_due(number) or source.is_last(number)
        source.check_forward(forward)
        wanted = forward.chunk == 0 and source.wants_inputs_of(number)
        if wanted and (called := copied(args, kwargs, chunk)) is not None:
            source.inputs[number] = called
        given = source.given.get((forward.chunk, number))
        if self.own is not None:
            self.own.check_losses(chunk, args, kwargs)
            self.own.begins(forward, chunk, given, source.knows_tokens(number))
        if given is not None:
            for device in given.on:
                source.send(forward, device)

    def ends(self, forward: Forward, complete: bool, output: object) -> bool:
        chunk, source = forward.chunk, self.source
        self.recomputes.settle(self._release)
        if complete:
            self.witness.check(source.routers[chunk], forward)
        else:
            if chunk == 0:
                source.inputs.pop(forward.number, None)
            self._abandon(forward)
        self.kept.narrow()
        if (given := source.given.get((chunk, forward.number))) is not None and complete:
            given.on.clear()  # ids for a recompute are in `kept`
        if self.own is not None:
            self.own.ends(chunk, forward if complete else None, given)
        source.ends(forward, complete, self.kept)
        if source.keeps is not None and len(self.kept) > len(self.recomputes):
            before = self.timeline.ended[chunk] - source.keeps
            for key in list(self.kept):
                is_old = self._chunk_of[key[0]] == chunk and key[1] < before
                if is_old and key not in self.recomputes:
                    self.kept.drop(key)
        if self._lasts:
            oldest = next(iter(self.recomputes), None)
            self.timeline.forget(None if oldest is None else (self._chunk_of[oldest[0]], oldest[1]))
        return complete and bool(self.recomputes)

    def _release(self, key: Key) -> None:
        if not self.source.records:
            self.kept.drop(key)

    def _abandon(self, forward: Forward) -> None:
        for layer in forward.called:
            key = layer, forward.number
            self.witness.forget(key)
            self.recomputes.drop(key)
            self.kept.drop(key)


class RouterCalls:
    """Answers the top-k of one router: begins and ends its calls, in forwards and in recomputes."""

    def __init__(
        self, answering: Answering, session: Session, router: Router, chunk: int, marks: Marks
    ) -> None:
        self._is_given = given = answering.own is not None
        self.block = session.undo  # identifies its calls in `seam.unwind`
        self.router, self.label = router, router.label
        self.last: Hook | None = None  # our last hook: `ends`, or `leaves` behind later hooks
        self._narrow = narrow_dtype(router.num_experts)  # the dtype in which its ids are kept
        self._answering, self._source, self._witness = answering, answering.source, answering.witness
        self._chunk, self._marks, self._timeline = chunk, marks, session.timeline
        self._may_keep_native = backward.TELLS_REGIONS and not (given or router.spare)
        self._leaves = session.may_wait(RouterCalls.leaves)
        self._is_block = router.shows is None
        self._mend = router.mend if given else None
        # How its top-k was caught last, in eval mode and in training: where by the guard, Watch stays off.
        self._ways: dict[bool, str | None] = {}
        # Used where other hooks come later: our hook behind them; the ended call with its output.
        self._behind: Hook | None = None
        self._ended: tuple[object, seam.Call] | None = None

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the router's forward: from here on its top-k is answered."""
        started = time.perf_counter()
        answering, router = self._answering, self.router
        hidden = args[0] if args and isinstance(args[0], torch.Tensor) else hidden_states(args, kwargs)
        if _is_batched(hidden):
            problem = "the router runs under vmap, where its rows can't be told apart"
            where = f"layer {router.label} ({router.path or 'the module itself'})"
            cause = "torch.vmap, torch.func.jacrev or the like around the model: loop over the batch"
            raise RouterError(problem, where=where, cause=cause)
        rows = hidden.numel() // hidden.shape[-1] * router.gathers
        number = self._marks.take_announced(router.module)
        if number is None and backward.in_backward():
            number = self._timeline.recomputed(self._chunk, self.label)
        if number is None and not self._source.answers(router):
            return
        choose = self._choose_given if self._is_given else self._choose_own
        choose = choose if number is None else self._choose_again
        call = seam.Call(rows, router.num_experts, router.topk, choose)
        call.owner, call.given, call.chooses_itself = self, self._is_given, not self._is_given
        call.drops, call.spare, call.counts = router.drops, router.spare, self._is_block
        call.expected = self._ways.get(router.module.training)
        call.watching = call.expected != "guard"
        call.follows = self._is_block and self._witness.follows(self.label)
        if number is None:
            call.forward, enclosed = self._live()
            call.keeps_native_topk = self._may_keep_native and not enclosed
            if call.forward.checked:
                call.follows = self._is_block
                if self._is_given and router.masks:
                    call.watching, call.steps = True, Steps(rows, router.num_experts)
            elif rows * router.topk <= FEW and not torch.is_inference_mode_enabled():
                call.keeps = False
            if self._is_given:
                call.routes = self._source.prepare(router, call.forward, rows, hidden.device)
        else:
            call.number = number
            call.follows |= self._is_block and is_due(number)
            call.routes = self._again(number, rows, hidden.device)
        if next(reversed(router.module._forward_hooks.values())) is not self.last and not self._is_block:
            if self._behind is None:
                self._behind = Hook(self, self._leaves, router.module)
                self.block.callback(self._behind.take_off)
            self._behind.take_off()
            router.module.register_forward_hook(self._behind)  # behind the hooks of others
            self.last = self._behind
        call.inside = caller_of_hook()
        call.begin()
        answering.seconds += time.perf_counter() - started

    def _live(self) -> tuple[Forward, bool]:
        """Return the forward that this call belongs to, and whether anything may run the call again."""
        forward, label = self._timeline.live(self._chunk), self.label
        if label in forward.called:
            raise called_again(self.router, forward, self._timeline)
        forward.called.add(label)
        around = self._timeline.enclosing(forward)
        if (foreseen := self._marks.take_foreseen(self.router.module)) is not None:
            around = [*around, foreseen]
        if around:
            self._answering.recomputes.expect((label, forward.number), around)
        return forward, bool(around)

    def _again(self, number: int, rows: int, device: torch.device) -> torch.Tensor:
        """Return the ids [rows, topk] of the forward's call, for a recompute."""
        where = micro_batch(number, self.label)
        ids = self._answering.kept.narrow().get((self.label, number))
        if ids is None:
            given = self._source.given.get((self._chunk, number))
            if given is None or given.missing is not None:
                problem = "this recompute was not foreseen when its forward ran, so its ids were not kept"
                cause = "recomputing by other means than torch's checkpoint or a custom autograd Function"
                raise RecomputeError(problem, where=where, cause=cause)
            ids = to_device(given.ids[:, given.columns[self.label]], device)
        if len(ids) != rows:
            problem = "the recompute has another number of tokens than its forward"
            cause, expected = "a forward of something else that a gradient hook runs", f"{len(ids)} rows"
            raise RecomputeError(problem, where=where, expected=expected, got=rows, cause=cause)
        self._answering.recomputes.ran.add((self.label, number))
        return ids

    def _choose_own(self, call: seam.Call) -> torch.Tensor:
        """Return the ids of a call in a forward, int64 [rows, topk]: the router's own choice."""
        ids, key = call.own(), (self.label, call.forward.number)
        if self._source.records or key in self._answering.recomputes:
            self._answering.kept.keep(key, ids, self._narrow)
        return ids

    def _choose_given(self, call: seam.Call) -> torch.Tensor:
        """Return the given ids, int64 [rows, topk]; rows without a route take the router's own choice."""
        routes, narrow, missing, given = call.routes
        ids, call.handed = given[self.label]
        chosen: torch.Tensor = ids.long()
        if call.handed is not None and call.handed._version:  # a forward that raised has written into it
            call.handed = chosen.clone()
        answering = self._answering
        if answering.own is not None:
            answering.own.compare(call, chosen, missing, routes)
        if missing is not None:  # never in place: layers may share their storage
            chosen, call.handed = chosen.index_copy(0, missing, call.own(missing)), None
        key = self.label, call.forward.number
        if self._source.records or key in answering.recomputes:
            if missing is None:
                answering.kept[key] = narrow[:, routes.columns[self.label]]
            else:
                answering.kept.keep(key, chosen, self._narrow)
        return chosen

    def _choose_again(self, call: seam.Call) -> torch.Tensor:
        """Return the ids of the forward's call, int64 [rows, topk], for its recompute."""
        if self._answering.own is not None:
            self._answering.own.count_in(call)
        ids: torch.Tensor = call.routes.long()
        if call.chooses_itself and call.asked is not None and call.asked[1].get("sorted"):
            # Megatron-core from 0.18 on requests sorted ids only with grad, which is off in a checkpoint's
            # forward. In another order of experts their outputs would be summed with other rounding.
            order = call.scores.detach().gather(1, ids).argsort(dim=1, descending=True, stable=True)
            ids = ids.gather(1, order)
        return ids

    def ends(self, args: tuple[Any, ...], output: object) -> object:
        """End the router's forward; a result that isn't None replaces the output."""
        call = seam.running(self)
        if call is None:
            return None  # `begins` raised, or left the call alone
        started = time.perf_counter()
        call.end()
        mended = None
        if output is not None:  # else the router raised, or its recompute was stopped early
            if call.way != call.expected:
                self._ways[self.router.module.training] = call.way
            if call.forward is not None:
                self._witness.saw(self.router, call.forward, call, output)
            elif call.way is not None:
                self._witness.saw_again(self.router, call.number, call, output)
            else:
                cause = routers.explained(self.router, call.seen)
                cause = cause or "a recompute that takes another path than the forward"
                problem = "the recompute of this router never reached its top-k"
                raise RecomputeError(problem, where=micro_batch(call.number, self.label), cause=cause)
            if self._mend is not None and call.ids is not None:
                mended = self._mend(output, call.ids)
            if self._behind is not None:
                self._ended = (output if mended is None else mended), call
        elif call.forward is None and self._is_block:
            self._witness.saw_stopped(self.router, call.number, call)
        self._answering.seconds += time.perf_counter() - started
        return mended

    def leaves(self, args: tuple[Any, ...], output: object) -> None:
        """Check the output again, after the hooks of others, which may have replaced it."""
        (ours, call), self._ended = self._ended or (output, None), None
        shows = self.router.shows
        if output is None or output is ours or call is None or call.ids is None or shows is None:
            return
        again = call.forward is None
        number, shown = call.number if again else call.forward.number, shows(output)
        if shown is not call.ids:
            self._witness.look(self.router, number, shown, call.ids, again=again)


def called_again(router: Router, forward: Forward, timeline: Timeline) -> MicroBatchError:
    """Return the error for a router that one forward calls twice: routes have one column for each router."""
    problem = "the router is called again before the forward of the model that was passed has ended"
    cause = (
        "a looped model, which runs layers several times in one forward (Inkling-2) and can't be replayed; a "
        "model that runs one sequence after another; layers that share one router; or MindSpeed's "
        "moe_fb_overlap, which runs a graph of before this block again"
    )
    if forward is timeline.bypassed:
        cause = f"{CALLED_INSIDE}; Megatron's overlap_moe_expert_parallel_comm does so too"
    return MicroBatchError(problem, where=micro_batch(forward.number, router.label), cause=cause)


def hidden_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """Return the first tensor that a router is called with."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    raise RouterError("the router was called without a tensor", expected="hidden states", got=args)
