"""Sessions: record, replay and pin_recompute.

A session hangs hooks on the routers and on the chunks of a model for the length of a block, and takes them
all away. What it keeps is keyed by (layer, micro-batch), never appended to a list, so a forward that raised
and is tried again, or a recompute in any order, finds its own.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

from npu_replay import compiled, seam
from npu_replay.errors import MicroBatchError, NoEffect, RecomputeError, ReplayError, RouterError, micro_batch
from npu_replay.recompute import in_backward
from npu_replay.routed_experts import RoutedExperts, narrow_dtype
from npu_replay.routers import Router, find
from npu_replay.timeline import Forward, Timeline

Model: TypeAlias = "nn.Module | Sequence[nn.Module]"
Key: TypeAlias = "tuple[int, int]"  # layer label, micro-batch

class _Calls(threading.local):
    """The routers' calls that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.stack: list[tuple[nn.Module, seam.Call]] = []

    def unwind(self) -> None:
        """Leave calls whose forward hook never ran: a KeyboardInterrupt skips it."""
        while self.stack:
            self.stack.pop()[1].__exit__()


_sessions: dict[int, Session] = {}
"""The open session of each router, by id: one router has one."""

_ways: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""How each router's top-k was caught last time; saves the safety net in the next session."""


class Session:
    """What record, replay and pin_recompute have in common. Use it as a context manager, once.

    Args:
        model: a module, or the list of its virtual-pipeline chunks. One micro-batch is one `__call__`
            of the module (of every chunk).
    """

    name = "session"

    def __init__(self, model: Model) -> None:
        self._chunks = chunks_of(model)
        self._timeline = Timeline(len(self._chunks))
        self._routers: list[list[Router]] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._stance: AbstractContextManager[None] | None = None
        self._flags: dict[Key, torch.Tensor] = {}
        self._unreached: dict[Key, Router] = {}
        self._pending: dict[Key, weakref.ref[Any]] = {}
        self._recomputed: set[Key] = set()
        self._calls = _Calls()
        self._seconds = 0.0
        self._state = "new"

    # What a kind of session decides

    def _check_model(self) -> None:
        """Refuse what doesn't fit, before any hook is registered."""

    def _check_forward(self, forward: Forward) -> None:
        """Refuse a micro-batch at its beginning."""

    def _live(self, router: Router, forward: Forward, rows: int, device: torch.device) -> seam.Choose:
        """How to choose in a forward."""
        raise NotImplementedError

    def _again(self, router: Router, number: int, device: torch.device) -> torch.Tensor:
        """The effective ids [rows, topk] of an earlier call of the router, for its recompute."""
        raise NotImplementedError

    def _forget(self, key: Key) -> None:
        """The forward of this call raised: drop what was kept."""

    def _release(self, key: Key) -> None:
        """The graph of this call is gone: drop what was kept for its recompute."""

    def _finish(self) -> None:
        """The body ended without an exception."""

    # The block

    def __enter__(self) -> Any:
        if self._state != "new":
            raise ReplayError(f"this {self.name} block was entered before", expected="a new one", got="a used one")
        self._routers = find(self._chunks)
        self._check_nesting()
        self._check_model()
        stance = compiled.eager(self._chunks, self._routers)
        self._state = "open"
        try:
            stance.__enter__()
            self._stance = stance
            seam.guard.install()
            self._attach()
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if kind is None:
            self._check_complete()
            self._finish()

    def metrics(self) -> dict[str, float]:
        """Plain numbers for any tracker."""
        return {"micro_batches": max(self._timeline.ended, default=0), "seconds": self._seconds}

    def _check_nesting(self) -> None:
        for router in self._all_routers():
            other = _sessions.get(id(router.module))
            if other is not None:
                raise RouterError(
                    f"{self.name} can't be opened inside {other.name} on the same router",
                    where=f"layer {router.label}",
                    expected="one open block for a router",
                    got=f"an open {other.name} block",
                    cause="a log-prob pass that is called from inside the update",
                )

    def _attach(self) -> None:
        for chunk, module in enumerate(self._chunks):
            for router in self._routers[chunk]:
                _sessions[id(router.module)] = self
                self._hook(router.module, *_router_hooks(self, router, chunk))
            self._hook(module, *_chunk_hooks(self, chunk))

    def _hook(self, module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
        # The last thing before the forward and the first after it: other hooks' top-k isn't the router's.
        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after, prepend=True, always_call=True))

    def _close(self) -> None:
        if self._state != "open":
            return
        self._state = "closed"
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for router in self._all_routers():
            if _sessions.get(id(router.module)) is self:
                del _sessions[id(router.module)]
        self._calls.unwind()
        if self._stance is not None:
            seam.guard.remove()
            self._stance.__exit__(None, None, None)
            self._stance = None

    def _all_routers(self) -> list[Router]:
        return [router for routers in self._routers for router in routers]

    # The chunks' hooks

    def _begin(self, chunk: int) -> None:
        forward = self._timeline.begin(chunk)
        for router in self._routers[chunk]:
            self._drop((router.label, forward.number))  # of a try that raised
        self._check_forward(forward)

    def _end(self, chunk: int, output: object) -> None:
        forward, complete = self._timeline.end(chunk, output)
        if complete:
            self._check_effect(chunk, forward)
        else:
            for layer in forward.called:
                self._drop((layer, forward.number))

    def _drop(self, key: Key) -> None:
        for kept in (self._flags, self._unreached, self._pending):
            kept.pop(key, None)
        self._recomputed.discard(key)
        self._forget(key)

    # The routers' hooks

    def _arm(self, router: Router, chunk: int, hidden: torch.Tensor) -> seam.Call:
        rows = hidden.numel() // hidden.shape[-1] * router.gathers
        verify = False
        if in_backward():
            choose = self._recompute(router, chunk, hidden.device)
        else:
            forward = self._timeline.live(chunk)
            self._check_first_call(router, forward)
            forward.called[router.label] = rows
            verify = forward.number == 0
            key = router.label, forward.number
            token = forward.pending()
            if token is not None:
                self._await_recompute(key, token)
            choose = self._live(router, forward, rows, hidden.device)
        watch = router.masks or _ways.get(router.module) != "guard"
        return seam.Call(
            rows, router.num_experts, router.topk, choose, masks=router.masks, watch=watch, verify=verify
        ).__enter__()

    def _disarm(self, router: Router, chunk: int, call: seam.Call, output: object) -> None:
        call.__exit__()
        if output is None:
            return  # the router raised, or its recompute was stopped early
        if call.way is not None:
            _ways[router.module] = call.way
        else:
            _ways.pop(router.module, None)
        if in_backward():
            if call.way is None:
                raise RecomputeError(
                    "the recompute of this router never reached its top-k",
                    where=f"layer {router.label}, in backward",
                    cause=router.bypass or "a recompute that takes another path than the forward",
                )
            return
        key = router.label, self._timeline.live(chunk).number
        if call.ids is None:
            self._unreached[key] = router
        elif call.verify:
            self._flags[key] = _effect(router, call, output)

    def _recompute(self, router: Router, chunk: int, device: torch.device) -> seam.Choose:
        number = self._timeline.recomputed(chunk, router.label)
        self._recomputed.add((router.label, number))
        ids = self._again(router, number, device)
        return lambda own: ids.long()

    def _await_recompute(self, key: Key, token: weakref.ref[Any]) -> None:
        """Note that autograd may yet recompute this call, and forget it when the graph dies."""
        alive = token()
        if alive is None:
            return
        me = weakref.ref(self)

        def died(_: object) -> None:
            session = me()
            if session is not None:
                session._graph_died(key)

        self._pending[key] = weakref.ref(alive, died)

    def _graph_died(self, key: Key) -> None:
        self._pending.pop(key, None)
        self._recomputed.discard(key)
        self._release(key)

    # Checks

    def _check_first_call(self, router: Router, forward: Forward) -> None:
        if router.label not in forward.called:
            return
        bypassed = forward is self._timeline.bypassed
        raise MicroBatchError(
            "the router is called again before the forward of the model that was passed has ended",
            where=micro_batch(forward.number, router.label),
            expected="one call of each router in one __call__ of the model",
            got="a second call",
            cause="the model's forward() or an inner module was called directly, past the __call__ of the module "
            "that was passed (Megatron's overlap_moe_expert_parallel_comm does)"
            if bypassed
            else "a model that runs its layers several times in one forward, one sequence after another",
        )

    def _check_effect(self, chunk: int, forward: Forward) -> None:
        """After every forward: was each top-k reached? After the first: do the outputs show the ids?"""
        for router in self._routers[chunk]:
            key = router.label, forward.number
            if router.label not in forward.called:
                self._no_effect(router, forward, "the router was not called", _PAST_CALL)
            if key in self._unreached:
                self._no_effect(router, forward, "the router never reached its top-k", router.bypass or _NO_TOPK)
        if forward.number == 0:
            flagged = [r for r in self._routers[chunk] if (r.label, 0) in self._flags]
            flags = torch.stack([self._flags.pop((r.label, 0)) for r in flagged]).tolist() if flagged else []
            for router, wrong in zip(flagged, flags, strict=True):
                if wrong:
                    self._no_effect(router, forward, "the router's output doesn't show the chosen experts", _CHANGED)

    def _no_effect(self, router: Router, forward: Forward, problem: str, cause: str) -> None:
        raise NoEffect(
            problem,
            where=f"{micro_batch(forward.number, router.label)} ({router.path or type(router.module).__name__})",
            expected=f"a top-{router.topk} over {router.num_experts} experts whose result is used",
            got="none, or another selection",
            cause=cause,
        )

    def _check_complete(self) -> None:
        """The body is through: did every chunk see the same forwards, and is nothing still to come?"""
        if (bypassed := self._timeline.bypassed) is not None:
            raise MicroBatchError(
                "the routers ran, but not through the __call__ of the module that was passed",
                where=micro_batch(bypassed.number),
                expected="each micro-batch to be one __call__ of that module",
                got="a call of its forward() or of an inner module",
                cause="pass the module that the training loop really calls",
            )
        ended = self._timeline.ended
        if max(ended) == 0:
            raise MicroBatchError(
                f"nothing ran inside this {self.name} block",
                expected="at least one __call__ of the module that was passed",
                got=0,
                cause="the training loop calls another module (an outer wrapper, or a copy)",
            )
        if min(ended) != max(ended):
            raise MicroBatchError(
                "the chunks ran different numbers of forwards",
                expected="every chunk once for each micro-batch",
                got=ended,
                cause="a schedule that was cut short, or a chunk that is missing from the list",
            )
        due = [k for k, token in self._pending.items() if k not in self._recomputed and token() is not None]
        if due:
            layer, number = min(due, key=lambda key: (key[1], key[0]))
            raise RecomputeError(
                f"the block ended before {len(due)} router calls were recomputed; after it they would choose anew",
                where=micro_batch(number, layer),
                expected="backward inside the block",
                got="a graph with checkpoints that is still alive",
                cause="loss.backward() after the with block; or outputs kept from a forward that should have "
                "run under torch.no_grad()",
            )


_PAST_CALL = (
    "a graph that was compiled or captured before the block and runs no hook, another path to the experts "
    "than the router's __call__, or a layer that this forward skipped"
)
_NO_TOPK = "a fused router kernel, a selection without torch.topk (sinkhorn in a kernel, a hash), or a captured graph"
_CHANGED = "code after the top-k that changes the ids (a forced load balance), or an output that npu_replay misreads"


class Recording(Session):
    """Keeps what every router chooses; `routes` holds it when the block has ended."""

    name = "record"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._ids: dict[Key, torch.Tensor] = {}
        self._routes: list[RoutedExperts] | None = None

    @property
    def routes(self) -> list[RoutedExperts]:
        """One RoutedExperts a micro-batch, in forward order; rows as the routers had them."""
        if self._routes is None:
            raise ReplayError(
                "the routes are complete when the record block has ended without an exception",
                expected="an ended block",
                got=f"a block that is {self._state}",
            )
        return self._routes

    def _live(self, router: Router, forward: Forward, rows: int, device: torch.device) -> seam.Choose:
        def choose(own: seam.Own) -> torch.Tensor:
            ids = own()
            self._ids[router.label, forward.number] = narrowed(ids, router)
            return ids

        return choose

    def _again(self, router: Router, number: int, device: torch.device) -> torch.Tensor:
        return self._ids[router.label, number]

    def _forget(self, key: Key) -> None:
        self._ids.pop(key, None)

    def _finish(self) -> None:
        count = self._timeline.ended[0]
        self._routes = [micro_batch_routes(self._ids, self._all_routers(), number) for number in range(count)]
        self._ids.clear()


class Replay(Session):
    """Makes every router choose what `routes` says.

    Args:
        model: see Session.
        routes: one RoutedExperts a micro-batch, in forward order; rows as the routers have them. Columns
            are picked by layer label, others are ignored. A row without a route takes the router's own
            choice.
        live_mismatch: also count where the router would have chosen otherwise. Costs its top-k.
    """

    name = "replay"

    def __init__(self, model: Model, routes: Sequence[RoutedExperts], *, live_mismatch: bool = False) -> None:
        super().__init__(model)
        self._routes = checked_routes(routes)
        self._staged: dict[int, tuple[torch.Tensor, torch.Tensor | None]] = {}
        self._kept: dict[Key, torch.Tensor] = {}
        self._live_mismatch = live_mismatch
        self._differing: torch.Tensor | int = 0
        self._compared = 0

    def metrics(self) -> dict[str, float]:
        """Micro-batches, rows, rows without a route, seconds; live_mismatch where it was asked for."""
        done = self._routes[: max(self._timeline.ended, default=0)]
        figures = super().metrics() | {
            "rows": sum(len(routes) for routes in done),
            "rows_without_route": sum(int((~routes.recorded).sum()) for routes in done),
        }
        if self._compared:
            figures["live_mismatch"] = float(self._differing) / self._compared
        return figures

    def _check_model(self) -> None:
        for number, routes in enumerate(self._routes):
            for router in self._all_routers():
                where = micro_batch(number, router.label)
                if router.label not in routes.layers:
                    raise RouterError(
                        "this decoder layer of the model is missing from the routes",
                        where=where,
                        expected=f"layers {[router.label for router in self._all_routers()]}",
                        got=list(routes.layers),
                        cause="routes of another pipeline stage, or counted over the MoE layers only where the "
                        "model has dense layers too",
                    )
                for what, ours, theirs in (
                    ("top-k", router.topk, routes.topk),
                    ("number of experts", router.num_experts, routes.num_experts),
                ):
                    if ours != theirs:
                        raise RouterError(
                            f"the routes have another {what} than the model",
                            where=where,
                            expected=ours,
                            got=theirs,
                            cause="rollout engine and trainer run different models or configs",
                        )

    def _check_forward(self, forward: Forward) -> None:
        if forward.number >= len(self._routes):
            raise MicroBatchError(
                "there are more micro-batches than routes",
                where=micro_batch(forward.number),
                expected=f"{len(self._routes)} forwards in this block",
                got=f"a forward number {forward.number + 1}",
                cause="the update cuts the batch into other micro-batches than the routes were laid out for, or an "
                "extra forward (a reference pass, an evaluation) runs inside the block",
            )

    def _live(self, router: Router, forward: Forward, rows: int, device: torch.device) -> seam.Choose:
        self._check_forward(forward)
        routes = self._routes[forward.number]
        if len(routes) != rows:
            raise MicroBatchError(
                "the routes have another number of tokens than the router",
                where=micro_batch(forward.number, router.label),
                expected=f"{rows} rows",
                got=len(routes),
                cause="padding, packing, sequence or context parallelism that the routes were not laid out for "
                "(TokenLayout does that)",
            )
        layers, recorded = self._stage(forward.number, device)
        ids = layers[routes.layers.index(router.label)]
        key = router.label, forward.number
        if recorded is None and not self._live_mismatch:
            if key in self._pending:
                self._kept[key] = ids
            return lambda own: ids.long()

        def choose(own: seam.Own) -> torch.Tensor:
            theirs, ours = ids.long(), own()
            if self._live_mismatch:
                self._compared += int(routes.recorded.sum())
                self._count_differing(theirs, ours, recorded)
            if recorded is not None:
                theirs = torch.where(recorded, theirs, ours)
                self._kept[key] = narrowed(theirs, router)
            elif key in self._pending:
                self._kept[key] = ids
            return theirs

        return choose

    def _stage(self, number: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One micro-batch on the device, [layers, rows, topk] narrow; and which rows, where not all."""
        staged = self._staged.get(number)
        if staged is None:
            routes = self._routes[number]
            layers = routes.ids.transpose(0, 1).contiguous().to(device, non_blocking=True)
            whole = bool(routes.recorded.all())
            recorded = None if whole else routes.recorded[:, None].to(device, non_blocking=True)
            staged = self._staged[number] = layers, recorded
        return staged

    def _end(self, chunk: int, output: object) -> None:
        super()._end(chunk, output)
        done = min(self._timeline.ended)
        for number in [n for n in self._staged if n < done]:
            del self._staged[number]  # what a recompute needs is kept by itself

    def _again(self, router: Router, number: int, device: torch.device) -> torch.Tensor:
        ids = self._kept.get((router.label, number))
        if ids is not None:
            return ids
        routes = self._routes[number]
        return routes.layer_ids(router.label).to(device, non_blocking=True)

    def _forget(self, key: Key) -> None:
        self._kept.pop(key, None)

    def _release(self, key: Key) -> None:
        self._kept.pop(key, None)

    def _count_differing(self, theirs: torch.Tensor, ours: torch.Tensor, recorded: torch.Tensor | None) -> None:
        differ = (theirs.sort(dim=1).values != ours.sort(dim=1).values).any(dim=1)
        if recorded is not None:
            differ &= recorded[:, 0]
        self._differing += differ.sum()

    def _check_complete(self) -> None:
        super()._check_complete()
        done = self._timeline.ended[0]
        if done < len(self._routes):
            raise MicroBatchError(
                "there were fewer micro-batches than routes",
                where=micro_batch(done),
                expected=f"{len(self._routes)} forwards in this block",
                got=done,
                cause="a schedule that was cut short, or routes of more than this rank's micro-batches",
            )


class Pinning(Session):
    """Makes every recompute choose what its own forward chose; the forwards choose freely."""

    name = "pin_recompute"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._kept: dict[Key, torch.Tensor] = {}

    def _live(self, router: Router, forward: Forward, rows: int, device: torch.device) -> seam.Choose:
        key = router.label, forward.number

        def choose(own: seam.Own) -> torch.Tensor:
            ids = own()
            if key in self._pending:
                self._kept[key] = narrowed(ids, router)
            return ids

        return choose

    def _again(self, router: Router, number: int, device: torch.device) -> torch.Tensor:
        ids = self._kept.get((router.label, number))
        if ids is None:
            raise RecomputeError(
                "this recompute was not foreseen when its forward ran, so its ids were not kept",
                where=micro_batch(number, router.label),
                cause="a way of recomputing that is neither torch's checkpoint nor a custom autograd Function",
            )
        return ids

    def _forget(self, key: Key) -> None:
        self._kept.pop(key, None)

    def _release(self, key: Key) -> None:
        self._kept.pop(key, None)
        if not self._pending:
            self._timeline.forget()  # a block may last for a whole training run


def record(model: Model) -> Recording:
    """Record the experts that the routers of `model` choose.

        with npu_replay.record(model) as recording:
            forward_backward_func(..., forward_only=True)
        recording.routes  # one RoutedExperts a micro-batch

    Outputs and gradients stay bit-equal to an untouched run. A recompute takes the recorded ids.

    Args:
        model: the module that the training loop calls, or the list of virtual-pipeline chunks.

    Raises:
        ReplayError: on entering, if a router can't be recorded or is in another block; in the block, if a
            router's choice can't be seen; on leaving, if nothing ran or a recompute is still to come.
    """
    return Recording(model)


def replay(model: Model, routes: Sequence[RoutedExperts], *, live_mismatch: bool = False) -> Replay:
    """Make the routers of `model` choose the experts in `routes`.

        with npu_replay.replay(model, recording.routes) as session:
            forward_backward_func(...)
        session.metrics()

    Args:
        model: the module that the training loop calls, or the list of virtual-pipeline chunks.
        routes: one RoutedExperts a micro-batch, in forward order; rows as the routers have them (Megatron:
            sequence-major; Hugging Face: batch-major). See TokenLayout for getting them there.
        live_mismatch: also count where the router would have chosen otherwise (costs its top-k).

    Raises:
        ReplayError: see docs/errors.md for what rises where.
    """
    return Replay(model, routes, live_mismatch=live_mismatch)


def pin_recompute(model: Model) -> Pinning:
    """Make activation recompute choose the experts that its own forward chose.

        with npu_replay.pin_recompute(model):
            train()

    Useful without RL: near ties flip in a recompute, and then gradients belong to no forward.
    """
    return Pinning(model)


def chunks_of(model: Model) -> list[nn.Module]:
    """The model chunks, from a module or a list of them."""
    chunks = [model] if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList) else list(model)
    for chunk in chunks:
        if not isinstance(chunk, nn.Module):
            raise RouterError("a model chunk isn't a module", expected="torch.nn.Module", got=type(chunk))
    return chunks


def checked_routes(routes: Sequence[RoutedExperts]) -> list[RoutedExperts]:
    """A list of RoutedExperts, or an error that says what it is instead."""
    if isinstance(routes, RoutedExperts):
        raise MicroBatchError(
            "replay takes a list",
            expected="one RoutedExperts a micro-batch",
            got="a single RoutedExperts",
            cause="[routes] was meant",
        )
    listed = list(routes)
    for number, one in enumerate(listed):
        if not isinstance(one, RoutedExperts):
            raise MicroBatchError(
                "this isn't RoutedExperts", where=micro_batch(number), expected="RoutedExperts", got=type(one)
            )
    if not listed:
        raise MicroBatchError(
            "there are no routes to replay", expected="one RoutedExperts a micro-batch", got="an empty list"
        )
    return listed


def micro_batch_routes(ids: dict[Key, torch.Tensor], routers: list[Router], number: int) -> RoutedExperts:
    """Put the layers of one micro-batch together."""
    routers = sorted(routers, key=lambda router: router.label)
    first = routers[0]
    for router in routers:
        for what, ours, other in (
            ("rows", len(ids[router.label, number]), len(ids[first.label, number])),
            ("top-k", router.topk, first.topk),
            ("experts", router.num_experts, first.num_experts),
        ):
            if ours != other:
                raise RouterError(
                    f"the routers differ in {what}, which one RoutedExperts can't hold",
                    where=micro_batch(number, router.label),
                    expected=f"{other}, as in layer {first.label}",
                    got=ours,
                    cause="pass the parts of the model to record() one by one",
                )
    stacked = torch.stack([ids[router.label, number] for router in routers], dim=1)
    labels = [router.label for router in routers]
    return RoutedExperts._adopt(stacked.cpu(), labels, first.num_experts)


def narrowed(ids: torch.Tensor, router: Router) -> torch.Tensor:
    """A narrow copy, on the device, that training may use (ids made under inference_mode may not)."""
    dtype = narrow_dtype(router.num_experts)
    if not ids.is_inference():
        return ids.to(dtype)
    with torch.inference_mode(False):
        return ids.to(dtype)


def _effect(router: Router, call: seam.Call, output: object) -> torch.Tensor:
    """A flag on the device: does the router's own output show other experts than it was given?"""
    assert call.ids is not None and call.suspect is not None
    with torch.no_grad():
        shown = router.shows(output)
        if shown.shape != (call.rows, router.num_experts):
            return torch.ones_like(call.suspect)
        chosen = torch.zeros_like(shown).scatter(1, call.ids, True)
        differ = shown & ~chosen if router.drops else shown != chosen
        return differ.any() | call.suspect


def _router_hooks(
    session: Session, router: Router, chunk: int
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Plain functions: copy.deepcopy of the model then shares them, and doesn't copy the session."""

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is not router.module:
            return _detach(module, before, after)
        started = time.perf_counter()
        call = session._arm(router, chunk, _first_tensor(args, kwargs))
        session._calls.stack.append((module, call))
        session._seconds += time.perf_counter() - started

    def after(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        stack = session._calls.stack
        if not stack or stack[-1][0] is not module:
            return  # the pre-hook raised, or this is a copy of the router
        started = time.perf_counter()
        session._disarm(router, chunk, stack.pop()[1], output)
        session._seconds += time.perf_counter() - started

    return before, after


def _chunk_hooks(session: Session, chunk: int) -> tuple[Callable[..., None], Callable[..., None]]:
    ours = session._chunks[chunk]

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module is not ours:
            return _detach(module, before, after)
        if not in_backward():
            session._begin(chunk)

    def after(module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if module is ours and not in_backward():
            session._end(chunk, output)

    return before, after


def _detach(module: nn.Module, before: Callable[..., None], after: Callable[..., None]) -> None:
    """Take our hooks off a copy of the model that was made while the block was open."""
    for hooks, ours in ((module._forward_pre_hooks, before), (module._forward_hooks, after)):
        for number in [number for number, hook in hooks.items() if hook is ours]:
            hooks.pop(number)
            module._forward_pre_hooks_with_kwargs.pop(number, None)
            module._forward_hooks_always_called.pop(number, None)


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    raise RouterError("the router was called without a tensor", expected="hidden states", got=args)
