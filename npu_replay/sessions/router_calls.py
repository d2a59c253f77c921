"""Run one router in the place of its own forward, and answer its top-k: in forwards and in recomputes.

The ids of a call are given ones, those of the forward that it repeats, or else the router's own choice.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from npu_replay.errors import RecomputeError, ReplayError, RouterError, micro_batch
from npu_replay.routers import Router, hidden_states
from npu_replay.routes.routed_experts import narrow_dtype
from npu_replay.seam import backward
from npu_replay.seam.backward import graph_task, sequence_number, top_hooks
from npu_replay.seam.call import Call, Choose
from npu_replay.seam.guarded import here
from npu_replay.seam.plan import Plan
from npu_replay.seam.quick_call import LARGE, QuickCall
from npu_replay.seam.torch_state import (
    ForwardInPlace,
    dispatch_modes,
    function_modes,
    outside_modes,
)
from npu_replay.sessions import effect
from npu_replay.sessions.micro_batch import MicroBatch, is_due
from npu_replay.sessions.route_source import Given, RouteSource, to_device

if TYPE_CHECKING:
    from npu_replay.sessions.first_error import FirstError
    from npu_replay.sessions.own_choice import OwnChoice
    from npu_replay.sessions.timeline import Marks

is_grad_enabled = torch.is_grad_enabled
_is_batched = torch._C._functorch.is_batchedtensor


@dataclass
class Shared:
    """Holds what the calls of all routers of a block share.

    Attributes:
        source: decides which routes each forward gets.
        own: asks for the routers' own choice where ids are given; None where the source gives none.
        seconds: time spent here, but for quick calls: a clock would be a part of what they cost.
    """

    source: RouteSource
    own: OwnChoice | None
    checks: effect.Checks = field(default_factory=effect.Checks)
    seconds: float = 0.0

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - started


class Closely:
    """Times what is done inside, out of everybody's modes; errors may wait.

    A class, since a recompute enters it twice and a generator would cost it 7 µs.
    """

    def __init__(self, shared: Shared, errors: FirstError) -> None:
        self._shared = shared
        self._errors = errors

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        self._outside = outside_modes()
        self._outside.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self._outside.__exit__(kind, error, trace)
        self._shared.seconds += time.perf_counter() - self._started
        return self._errors.__exit__(kind, error, trace)


def given_ids(call: Call) -> torch.Tensor:
    """Return the given ids, int64 [rows, topk]; rows without a route take the router's own choice."""
    calls: RouterCalls = call.owner
    own = calls.shared.own
    on_device: Given = call.routes
    missing = on_device.missing
    ids = on_device.by_layer[calls.label].long()
    if call.micro_batch.compares and own is not None:
        own.compare(call, ids, on_device)
    if missing is not None:  # never in place: layers may share their storage
        ids = ids.index_copy(0, missing, call.own(missing))
    return ids


def ids_of_forward(call: Call) -> torch.Tensor:
    """Return the ids of the forward's call for its recompute, int64 [rows, topk]."""
    own = call.owner.shared.own
    if own is not None:
        own.count_in(call)
    ids: torch.Tensor = call.routes.long()
    if not call.plan.is_given and call.taken_by is not None and call.taken_by[2].get("sorted"):
        # Megatron-core from 0.18 on requests sorted ids only with grad, which is off in a checkpoint's
        # forward. In another order of experts their outputs would be summed with other rounding.
        order = call.scores.detach().gather(1, ids).argsort(dim=1, descending=True, stable=True)
        ids = ids.gather(1, order)
    return ids


class RouterCalls(ForwardInPlace):
    """Takes the place of one router's forward while a block is open, and answers its top-k."""

    def __init__(self, shared: Shared, errors: FirstError, router: Router, marks: Marks) -> None:
        super().__init__(router.module)
        self.is_given = shared.own is not None
        self.router = router
        self.label = router.label
        self.narrow = narrow_dtype(router.num_experts)  # the dtype in which its ids are kept
        self.shared = shared
        self.marks = marks
        self.timeline = marks.timeline
        self.ready: QuickCall | None = None  # the next call, if it is quick
        self.further = 0  # top-ks behind the answered one of a block, in its last checked call
        self._closely = Closely(shared, errors)
        self._chooses: Choose = given_ids if self.is_given else Call.own  # in a forward
        self._keeps_native = backward.TELLS_REGIONS and not (self.is_given or router.spare)
        self._mend = router.mend if self.is_given else None
        plan = Plan(
            num_experts=router.num_experts,
            topk=router.topk,
            is_given=self.is_given,
            drops=router.drops,
            spare=router.spare,
            leaves=router.leaves,
            masks=router.masks,
            is_block=router.shows is None,
            inside=RouterCalls._run_closely.__code__,
        )
        self._plans = {True: plan, False: plan}  # by `module.training`
        self._most_rows = LARGE // router.num_experts

    def take_off(self) -> None:
        super().take_off()
        for name in ("ready", "shared", "timeline", "marks", "_closely"):
            vars(self)[name] = None  # a wrapper of somebody's may hold this for ever

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the router; its top-k is answered."""
        call = self.ready
        if (
            call is None
            or self.marks.any
            or not call.micro_batch.is_open
            or here.call is not None
            or graph_task() != -1
            or function_modes()
            or dispatch_modes()
        ):
            return self._run_closely(args, kwargs)
        self.ready = None
        forward = call.micro_batch
        # Without grad a custom Function may enclose the call, if grad was on before.
        if (
            forward.enclosing
            or top_hooks(True)
            or (not is_grad_enabled() and (forward.grad or sequence_number() != forward.made))
        ) and (around := self.timeline.enclosing(forward)):
            # What may run the call again needs the same graph each time, so the ids are gathered.
            call.around = around
            call.keeps_native_topk = False
        forward.calls[self.label] = call
        try:
            here.call = call
            output = self.native(*args, **kwargs)
        finally:
            here.call = None
        if call.ids is None or self._mend is not None:
            if call.ids is None and self.is_given:
                call.rows = self._rows_of(hidden_states(args, kwargs))  # of the routes, until now
            return self._end_closely(call, output)
        try:
            # Not the output, whose graph would live on: the next router then gets memory that no cache holds.
            shows: Any = self.router.shows  # no block's calls are quick
            shown = shows(output)
        except ReplayError:  # raised again there, or kept (`errors_wait`)
            return self._end_closely(call, output)
        if call.rows > self._most_rows:
            forward.checks.append(effect.looked_at(call, shown, call.ids))
            shown = None
        call.end(shown)
        return output

    def _run_closely(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        call: Call | None = None
        if self.is_on:
            in_mode = bool(function_modes() or dispatch_modes())  # of somebody's, which is off inside
            with self._closely:
                call = self._begin(args, kwargs, in_mode)
        if call is None:
            return self.native(*args, **kwargs)
        with call:
            output = self.native(*args, **kwargs)
        return self._end_closely(call, output)

    def _end_closely(self, call: Call, output: Any) -> Any:
        mended = None
        with self._closely:
            mended = self._end(call, output)
        return output if mended is None else mended

    # A call begins

    def prepare(self, begun: MicroBatch, routes: Any, ids: torch.Tensor | None) -> None:
        """Make the call of this router in a forward that begins, unless it needs a closer look.

        Args:
            routes: the given routes on their device (`Given`); None where routers choose.
            ids: the given ids, int64 [rows, topk], if that is all that the call needs.
        """
        plan = self._plans[self.module.training]
        self.ready = None
        if plan.is_quick:
            native = self._keeps_native
            self.ready = QuickCall(self, plan, begun, begun.rows, self._chooses, routes, ids, False, native)

    def _begin(self, args: tuple[Any, ...], kwargs: dict[str, Any], in_mode: bool) -> Call | None:
        """Return the call that begins; None if the router is left alone."""
        hidden = hidden_states(args, kwargs)
        repeated = self.marks.take_announced(self.module)
        if repeated is None and backward.in_backward():
            repeated = self.timeline.recomputed(self.marks.chunk, self.label)
        if repeated is not None:
            return self._begin_recompute(repeated, hidden, in_mode)
        if not self.shared.source.answers(self.router):
            return None
        return self._begin_live(hidden)

    def _begin_live(self, hidden: torch.Tensor) -> Call:
        """Return the call of a forward; refuse one whose routes have other rows."""
        forward = self.timeline.live(self.marks.chunk, self.label)
        if self.label in forward.calls:
            raise self.timeline.called_again(self.label, forward)
        around = self.timeline.enclosing(forward)
        if (foreseen := self.marks.take_foreseen(self.module)) is not None:
            around = [*around, foreseen]
        rows = self._rows_of(hidden)
        routes = None
        loses = None
        if self.is_given:
            device_routes = self.shared.source.fitting(self.router, forward, rows)
            if hidden.device not in device_routes.on:
                self.shared.source.send(forward, hidden.device)
            routes = device_routes.on[hidden.device]
            loses = routes.lost_of(self.label) if self.router.drops else None
        self._refuse_batched(hidden)
        forward.calls[self.label] = call = Call(
            *(self, self._plans[self.module.training], forward, rows),
            choose=self._chooses,
            routes=routes,
            loses=loses,
            around=around,
            checked=forward.checked,
            follows=self.further > 0,
            keeps_native_topk=self._keeps_native and not around,
        )
        return call

    def _begin_recompute(self, repeated: MicroBatch, hidden: torch.Tensor, in_mode: bool) -> Call:
        """Return the call of a recompute; refuse one that isn't of a forward's.

        A mode may count the operations of a forward and of its recompute, as a selective checkpoint's does:
        then no call is quick.
        """
        plan = self._plans[self.module.training]
        rows = self._rows_of(hidden)
        ids = self._ids_again(repeated, rows, hidden.device)
        if plan.is_quick and not (is_due(repeated.number) or in_mode or here.call):
            return QuickCall(self, plan, repeated, rows, ids_of_forward, ids, None, True, False)
        self._refuse_batched(hidden)
        return Call(
            *(self, plan, repeated, rows),
            choose=ids_of_forward,
            routes=ids,
            loses=repeated.lost.get(self.label),
            is_recompute=True,
        )

    def _refuse_batched(self, hidden: torch.Tensor) -> None:
        router = self.router
        if _is_batched(hidden):
            raise RouterError(
                "the router runs under vmap, where its rows can't be told apart",
                where=f"layer {router.label} ({router.path or 'the module itself'})",
                cause="torch.vmap, torch.func.jacrev or the like around the model: loop over the batch",
            )

    def _rows_of(self, hidden: torch.Tensor) -> int:
        """Return the number of rows of the scores that the router makes of its input."""
        return hidden.numel() // hidden.shape[-1] * self.router.gathers

    def _ids_again(self, repeated: MicroBatch, rows: int, device: torch.device) -> torch.Tensor:
        """Return the ids [rows, topk] of the forward's call, for a recompute."""
        where = micro_batch(repeated.number, self.label)
        ids = repeated.ids_of(self.label)
        if ids is None:
            device_routes = self.shared.source.given.get(repeated.key)
            if device_routes is None or device_routes.missing is not None:
                raise RecomputeError(
                    "this recompute was not foreseen when its forward ran, so its ids were not kept",
                    where=where,
                    cause="recomputing by other means than torch's checkpoint or a custom autograd Function",
                )
            ids = to_device(device_routes.ids[:, device_routes.columns[self.label]], device)
        if len(ids) != rows:
            raise RecomputeError(
                "the recompute has another number of tokens than its forward",
                where=where,
                expected=f"{len(ids)} rows",
                got=rows,
                cause="a forward of something else that a gradient hook runs",
            )
        repeated.ran.add(self.label)
        return ids

    # A call ends

    def _end(self, call: Call, output: object) -> object:
        """End a call; a result that isn't None replaces the output."""
        call.end()
        if not isinstance(call, QuickCall):
            self._plans[self.module.training] = call.learned()
        if call.is_recompute:
            self._end_recompute(call, output)
        else:
            self._end_live(call, output)
        return None if self._mend is None or call.ids is None else self._mend(output, call.ids)

    def _end_live(self, call: Call, output: object) -> None:
        forward = call.micro_batch
        if call.ids is None and self.is_given:
            # Refuses routes with other rows, of which a quick call answers no top-k.
            self.shared.source.fitting(self.router, forward, call.rows)
        if forward.checked:
            self.further = call.further
        forward.checks.extend(effect.of_forward(call, output))

    def _end_recompute(self, call: Call, output: object) -> None:
        if call.way is None:
            raise RecomputeError(
                "the recompute of this router never reached its top-k",
                where=micro_batch(call.micro_batch.number, self.label),
                cause=self.router.bypass or "a recompute that takes another path than the forward",
            )
        checks = list(effect.of_recompute(call, output))
        self.shared.checks.add(checks)
        if checks and checks[-1].right is not None and checks[-1].right.is_cpu:
            self.shared.checks.read(wait=True)
