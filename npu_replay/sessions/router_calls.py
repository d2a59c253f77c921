"""Answer the top-k of one router: begin and end its calls, in forwards and in recomputes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from npu_replay import routers
from npu_replay.errors import MicroBatchError, RecomputeError, RouterError, micro_batch
from npu_replay.routers import Router
from npu_replay.routes.routed_experts import narrow_dtype
from npu_replay.sessions import backward, seam
from npu_replay.sessions.choices import given_ids, ids_of_forward, own_choice
from npu_replay.sessions.effect import Witness, is_due
from npu_replay.sessions.guarded import here
from npu_replay.sessions.masks import Steps
from npu_replay.sessions.micro_batches import (
    CALLED_INSIDE,
    Forward,
    KeptIds,
    Marks,
    Recomputes,
    Timeline,
)
from npu_replay.sessions.own_choice import OwnChoice
from npu_replay.sessions.quick_call import LARGE, Plan, QuickCall
from npu_replay.sessions.route_source import RouteSource, to_device
from npu_replay.sessions.session import Session
from npu_replay.sessions.torch_state import Hook, caller_of_hook, dispatch_modes, function_modes

_is_batched = torch._C._functorch.is_batchedtensor


@dataclass
class Shared:
    """Holds what the calls of all routers of a block share.

    Attributes:
        source: decides which routes each forward gets.
        own: asks for the routers' own choice where ids are given; None where the source gives none.
        kept: ids of calls.
        seconds: time spent here, but for quick calls: a clock would be a part of what they cost.
    """

    source: RouteSource
    own: OwnChoice | None
    kept: KeptIds = field(default_factory=KeptIds)
    witness: Witness = field(default_factory=Witness)
    recomputes: Recomputes = field(default_factory=Recomputes)
    seconds: float = 0.0

    def clear(self) -> None:
        self.witness.clear()
        self.recomputes.clear()
        self.kept.clear()
        self.source.clear()


class RouterCalls:
    """Answers the top-k of one router: begins and ends its calls, in forwards and in recomputes."""

    def __init__(self, shared: Shared, session: Session, router: Router, chunk: int, marks: Marks) -> None:
        self.is_given = given = shared.own is not None
        self.block = session.undo  # identifies its calls in `seam.unwind`
        self.router = router
        self.module = router.module
        self.label = router.label
        self.last: Hook | None = None  # our last hook: `ends`, or `leaves` behind later hooks
        self.narrow = narrow_dtype(router.num_experts)  # the dtype in which its ids are kept
        self.shared = shared
        self._source = shared.source
        self._witness = shared.witness
        self._chunk = chunk
        self.marks = marks
        self.timeline = session.timeline
        self.may_keep_native = backward.TELLS_REGIONS and not (given or router.spare)
        self.chooses = given_ids if given else own_choice  # in a forward
        self._leaves = session.may_wait(RouterCalls.leaves)
        self._is_block = router.shows is None
        self._mend = router.mend if given else None
        self.ready: QuickCall | None = None  # the next call, if it is quick
        self.quick: QuickCall | None = None  # the running call, if it is quick
        self._plans: dict[bool, Plan] = {}  # by `module.training`
        # Used where other hooks come later: our hook behind them; the ended call with its output.
        self._behind: Hook | None = None
        self._ended: tuple[object, seam.Call] | None = None
        self.num_experts = router.num_experts
        self.topk = router.topk
        self.shape: Sequence[int] = ()  # of the scores of its last quick call
        self.most_rows = LARGE // router.num_experts  # see LARGE
        self.ends_slowly = self._mend is not None  # or another's hook comes behind ours

    def prepare(self, forward: Forward, ids: torch.Tensor | None) -> None:
        """Make the call of this router in a forward that begins, unless it needs a closer look.

        Args:
            ids: the given ids, int64 [rows, topk], if that is all that the call needs.
        """
        plan = self._plans.get(self.module.training)
        if plan is None or not plan.is_quick:
            self.ready = None
            return
        self.ready = call = QuickCall(self, plan, forward, forward.rows)
        call.routes = forward.given
        call.direct = ids
        call.keeps_native_topk = self.may_keep_native

    def _begins_again_quickly(self, args: tuple[Any, ...]) -> bool:
        """Begin a recompute in an unchecked micro-batch; return False if this is another call."""
        plan = self._plans.get(self.module.training)
        if plan is None or not plan.is_quick or self.marks.any or here.running is not None:
            return False
        if not backward.in_backward() or function_modes() or dispatch_modes():
            return False
        number = self.timeline.recomputed(self._chunk, self.label)
        if is_due(number) or not args or not isinstance(args[0], torch.Tensor):
            return False
        call = QuickCall(self, plan, None, self._rows_of(args[0]))
        self._set_again(call, number, args[0].device)
        call.begin()
        return True

    def look(self, call: QuickCall) -> None:
        """Check at once what a call has shown."""
        self._witness.look(self.router, call.forward.number, call.shown, call.ids)
        call.shown = None

    def keep(self, call: seam.Call) -> None:
        """Keep the ids of a forward's call that has ended, for a record or a recompute."""
        if call.around:
            self.shared.recomputes.expect((self.label, call.forward.number), call.around)
            call.around = ()  # it lives no longer than its graph
        elif not self._source.records:
            return
        key = self.label, call.forward.number
        if call.lost is not None:
            self.shared.kept.lost[key] = call.lost
        given = call.routes
        if given is not None and given.missing is None:
            self.shared.kept[key] = given.narrow[:, given.routes.columns[self.label]]
        elif call.ids is not None:
            self.shared.kept.keep(key, call.ids, self.narrow)

    def begins(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin the router's forward: from here on its top-k is answered."""
        if self._begins_again_quickly(args):
            return
        started = time.perf_counter()
        call = self._begin(args, kwargs)
        if call is not None:
            call.begin()
        self.shared.seconds += time.perf_counter() - started

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> seam.Call | None:
        """Return the call that begins; None if the router is left alone."""
        router = self.router
        hidden = args[0] if args and isinstance(args[0], torch.Tensor) else hidden_states(args, kwargs)
        rows = self._rows_of(hidden)
        call = seam.Call(rows, router.num_experts, router.topk, given=self.is_given, owner=self)
        number = self.marks.take_announced(router.module)
        if number is None and backward.in_backward():
            number = self.timeline.recomputed(self._chunk, self.label)
        if number is not None:
            self._set_again(call, number, hidden.device)
        elif self._source.answers(router):
            self._begin_live(call, hidden.device)
        else:
            return None
        self._look_closely(call, hidden)
        return call

    def _begin_live(self, call: seam.Call, device: torch.device) -> None:
        """Prepare the call of a forward; refuse one whose routes have other rows."""
        call.forward, call.around = forward, around = self._live()
        call.keeps_native_topk = self.may_keep_native and not around
        call.choose = self.chooses
        if self.is_given:
            call.routes = self._source.prepare(self.router, forward, call.rows, device)

    def _set_again(self, call: seam.Call, number: int, device: torch.device) -> None:
        """Prepare the call of a recompute; refuse one that isn't of a forward's."""
        call.choose = ids_of_forward
        call.number = number
        call.routes = self._again(number, call.rows, device)

    def _look_closely(self, call: seam.Call, hidden: torch.Tensor) -> None:
        """Set what a call needs that finds out how the router takes its top-k."""
        router = self.router
        forward = call.forward
        if _is_batched(hidden):
            problem = "the router runs under vmap, where its rows can't be told apart"
            where = f"layer {router.label} ({router.path or 'the module itself'})"
            cause = "torch.vmap, torch.func.jacrev or the like around the model: loop over the batch"
            raise RouterError(problem, where=where, cause=cause)
        call.drops = router.drops
        call.spare = router.spare
        call.leaves = router.leaves
        call.counts = self._is_block
        plan = self._plans.get(router.module.training)
        call.watching = plan is None or plan.way != "guard"
        checked = is_due(call.number) if forward is None else forward.checked
        call.follows = self._is_block and (checked or self._witness.follows(self.label))
        if forward is not None and checked and self.is_given and router.masks:
            call.watching, call.steps = True, Steps(call.rows, router.num_experts)
        if next(reversed(router.module._forward_hooks.values())) is not self.last and not self._is_block:
            if self._behind is None:
                self._behind = Hook(self, self._leaves, router.module)
                self.ends_slowly = True
                self.block.callback(self._behind.take_off)
            self._behind.take_off()
            router.module.register_forward_hook(self._behind)  # behind the hooks of others
            self.last = self._behind
        call.inside = caller_of_hook()

    def _rows_of(self, hidden: torch.Tensor) -> int:
        """Return the number of rows of the scores that the router makes of its input."""
        return hidden.numel() // hidden.shape[-1] * self.router.gathers

    def _live(self) -> tuple[Forward, list[Any]]:
        """Return the forward that this call belongs to, and all that may run the call again."""
        forward = self.timeline.live(self._chunk)
        label = self.label
        if label in forward.called or any(call.owner is self for call in forward.ended):
            raise called_again(self.router, forward, self.timeline)
        forward.called.add(label)
        around = self.timeline.enclosing(forward)
        if (foreseen := self.marks.take_foreseen(self.router.module)) is not None:
            around = [*around, foreseen]
        return forward, around

    def _again(self, number: int, rows: int, device: torch.device) -> torch.Tensor:
        """Return the ids [rows, topk] of the forward's call, for a recompute."""
        where = micro_batch(number, self.label)
        ids = self.shared.kept.narrow().get((self.label, number))
        running = self.timeline.running(self._chunk)
        if ids is None and running is not None and running.number == number:
            ids = next((call.ids for call in running.ended if call.owner is self), None)
        if ids is None:
            given = self._source.given.get((self._chunk, number))
            if given is None or given.missing is not None:
                problem = "this recompute was not foreseen when its forward ran, so its ids were not kept"
                cause = "recomputing by other means than torch's checkpoint or a custom autograd Function"
                raise RecomputeError(problem, where=where, cause=cause)
            ids = to_device(given.ids[:, given.columns[self.label]], device)
        if len(ids) != rows:
            problem = "the recompute has another number of tokens than its forward"
            cause = "a forward of something else that a gradient hook runs"
            expected = f"{len(ids)} rows"
            raise RecomputeError(problem, where=where, expected=expected, got=rows, cause=cause)
        self.shared.recomputes.ran.add((self.label, number))
        return ids

    def ends(self, args: tuple[Any, ...], output: object) -> object:
        """End the router's forward; a result that isn't None replaces the output."""
        self.quick = None
        call = seam.running(self)
        if call is None:
            return None  # `begins` raised, or left the call alone
        started = time.perf_counter()
        call.end()
        mended = None
        if output is not None:  # else the router raised, or its recompute was stopped early
            if not isinstance(call, QuickCall):
                self._plans[self.router.module.training] = Plan.of(call)
            elif call.ids is None and call.forward is not None and self.is_given:
                hidden = hidden_states(args, {})
                # Refuses routes with other rows, of which no top-k was answered.
                self._source.prepare(self.router, call.forward, self._rows_of(hidden), hidden.device)
            if call.forward is not None:
                call.forward.called.add(self.label)
                self.keep(call)
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
        self.shared.seconds += time.perf_counter() - started
        return mended

    def leaves(self, args: tuple[Any, ...], output: object) -> None:
        """Check the output again, after the hooks of others, which may have replaced it."""
        (ours, call) = self._ended or (output, None)
        self._ended = None
        shows = self.router.shows
        if output is None or output is ours or call is None or call.ids is None or shows is None:
            return
        again = call.forward is None
        number = call.number if again else call.forward.number
        shown = shows(output)
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
