"""Session: what record, replay and pin_recompute have in common.

A session hangs hooks on the routers and on the chunks of a model for the length of a block, and takes them
all away. What it keeps is keyed by (layer, micro-batch), never appended to a list, so a forward that raised
and is tried again, or a recompute in any order, finds its own.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from npu_replay import routers
from npu_replay.errors import (
    MicroBatchError,
    RecomputeError,
    ReplayError,
    RouterError,
    described,
    micro_batch,
)
from npu_replay.routers import Model, Router, chunks_of, find
from npu_replay.routes.routed_experts import narrow_dtype
from npu_replay.sessions import compiled, seam
from npu_replay.sessions.hooks import Hook
from npu_replay.sessions.marks import Marks
from npu_replay.sessions.micro_batches import CALLED_INSIDE, Forward, Timeline
from npu_replay.sessions.recompute import in_backward
from npu_replay.sessions.witness import Key, Witness


class _Running(NamedTuple):
    """One call of a router, while it runs."""

    module: nn.Module
    call: seam.Call
    recomputes: bool


class _Calls(threading.local):
    """The routers' calls that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Running] = []

    def unwind(self) -> None:
        """Leave calls whose forward hook never ran: a KeyboardInterrupt skips it."""
        while self.stack:
            self.stack.pop().call.__exit__()


_sessions: dict[int, Session] = {}
"""The open session of each router, by id: one router has one."""

_ways: WeakKeyDictionary[nn.Module, str | None] = WeakKeyDictionary()
"""How each router's top-k was caught last time; saves the safety net in the next session."""


class Session:
    """What record, replay and pin_recompute have in common. Use it as a context manager, once.

    Args:
        model: a module, or the list of its virtual-pipeline chunks. One micro-batch is one `__call__`
            of the module (of every chunk).
    """

    name = "session"
    foreign = False
    """May routers be given ids that they would not have chosen?"""

    def __init__(self, model: Model) -> None:
        self._chunks = chunks_of(model)
        self._timeline = Timeline(len(self._chunks))
        self._routers: list[list[Router]] = []
        self._way: dict[int, str | None] = {}
        self._handles: list[routers.Handle] = []
        self._stance: AbstractContextManager[None] | None = None
        self._witness = Witness()
        self._pending: dict[Key, list[weakref.ref[Any]]] = {}
        self._recomputed: set[Key] = set()
        self._kept: dict[Key, torch.Tensor] = {}
        self._tokens: dict[int, torch.Tensor] = {}
        self._calls = _Calls()
        self._marks: list[Marks] = []
        self._functions: dict[str, object] = {}
        self._seconds = 0.0
        self._count = 0
        self._state = "new"

    def __repr__(self) -> str:
        states = {"new": "not entered", "open": f"open on {self._count} routers", "closed": "ended"}
        return f"{type(self).__name__}({states[self._state]}, {self._holds()})"

    # What a kind of session decides

    def _holds(self) -> str:
        """What repr shows beside the state."""
        return f"{self._done()} micro-batches"

    def _check_model(self) -> None:
        """Refuse what doesn't fit, before any hook is registered."""

    def _check_forward(self, forward: Forward) -> None:
        """Refuse a micro-batch at its beginning."""

    def _live(self, router: Router, forward: Forward, rows: int, device: torch.device) -> seam.Choose:
        """How to choose in a forward."""
        raise NotImplementedError

    def _again(self, router: Router, number: int, device: torch.device) -> torch.Tensor:
        """The effective ids [rows, topk] of an earlier call of the router, for its recompute."""
        ids = self._kept.get((router.label, number))
        if ids is None:
            raise RecomputeError(
                "this recompute was not foreseen when its forward ran, so its ids were not kept",
                where=micro_batch(number, router.label),
                cause="recomputing by other means than torch's checkpoint or a custom autograd Function",
            )
        return ids

    def _tokens_wanted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The token ids of this call of the first chunk, to be held against its routes; None for none."""
        return None

    def _compares(self, router: Router) -> bool:
        """Is this call's own choice wanted beside the ids that are used?"""
        return False

    def _is_checked(self, number: int) -> bool:
        """Is the effect checked in this micro-batch: 0, 1, 2, 4, 8, ...?

        In the first the routes may be what the router would have chosen anyway, so that having no effect
        shows nothing; an optimizer that steps inside the block changes that.
        """
        return number & (number - 1) == 0

    def _forget(self, key: Key) -> None:
        """The forward of this call raised: drop what was kept."""
        self._kept.pop(key, None)

    def _release(self, key: Key) -> None:
        """The graph of this call is gone: drop what was kept for its recompute."""
        self._kept.pop(key, None)

    def _finish(self) -> None:
        """The body ended without an exception."""

    def _clear(self) -> None:
        """The block is over: keep neither the model nor ids that only a recompute would want."""
        for kept in (self._witness, self._pending, self._kept, self._tokens):
            kept.clear()
        for held in (self._routers, self._chunks):
            held.clear()
        self._marks.clear()

    # The block

    def __enter__(self) -> Any:
        if self._state != "new":
            raise ReplayError(
                f"this {self.name} block was entered before", expected="a new one", got="a used one"
            )
        self._routers = find(self._chunks)
        self._way = {router.label: _ways.get(router.module) for router in self._all_routers()}
        self._count = len(self._all_routers())
        self._check_nesting()
        self._check_model()
        stance = compiled.eager(self._chunks, self._routers)
        self._functions = routers.functions(self._all_routers())
        self._state = "open"
        self._timeline = Timeline(len(self._chunks))
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
        try:
            if kind is None:
                self._check_complete()
                self._finish()
        finally:
            self._clear()

    def _done(self) -> int:
        """Micro-batches whose forward has ended."""
        return max(self._timeline.ended, default=0)

    def metrics(self) -> dict[str, float]:
        """Plain numbers for any tracker: micro-batches, routers, seconds spent here.

        Where tokens over an expert's capacity are dropped also capacity_dropped, the share of chosen experts
        that lost their token, in the micro-batches whose outputs are checked (0, 1, 2, 4, 8, ...).
        """
        figures = {
            "micro_batches": self._done(),
            "routers": self._count,
            "seconds": self._seconds,
        }
        counted = self.counts()
        if counted["chosen"]:
            figures["capacity_dropped"] = counted["dropped"] / counted["chosen"]
        return figures

    def counts(self) -> dict[str, int]:
        """The whole numbers behind `metrics`, which ranks can add up. Waits for the device."""
        return {
            "routers": self._count,
            "microseconds": int(self._seconds * 1e6),
            "dropped": int(self._witness.dropped),
            "chosen": self._witness.chosen,
        }

    def _check_nesting(self) -> None:
        for router in self._all_routers():
            other = _sessions.get(id(router.module))
            if other is not None:
                raise RouterError(
                    f"{self.name} can't be opened inside {other.name} on the same router",
                    where=f"layer {router.label}",
                    expected="one open block for a router",
                    got=f"an open {other.name} block",
                    cause="a log-prob pass that is called from inside the update, or an earlier block that "
                    "was entered and never left",
                )

    def _attach(self) -> None:
        for chunk, module in enumerate(self._chunks):
            # The chunk first: it may itself be the router, and its forward begins before its top-k.
            self._hook(module, Session._chunk_begins, Session._chunk_ends, chunk)
            for router in self._routers[chunk]:
                _sessions[id(router.module)] = self
                self._hook(router.module, Session._router_begins, Session._router_ends, router, chunk)
            self._marks.append(Marks(functools.partial(self._timeline.number, chunk)))
            self._handles.extend(routers.mark(module, self._routers[chunk], self._marks[chunk]))

    def _hook(
        self, module: nn.Module, before: Callable[..., object], after: Callable[..., object], *at: Any
    ) -> None:
        # The last thing before the forward and the first after it: other hooks' top-k isn't the router's.
        begins, ends = Hook(self, before, module, *at), Hook(self, after, module, *at)
        self._handles.append(module.register_forward_pre_hook(begins, with_kwargs=True))
        self._handles.append(module.register_forward_hook(ends, prepend=True, always_call=True))

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

    def _chunk_begins(self, chunk: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not in_backward():
            self._begin(chunk)
            if chunk == 0 and (tokens := self._tokens_wanted(args, kwargs)) is not None:
                self._tokens[self._timeline.number(chunk)] = tokens

    def _chunk_ends(self, chunk: int, args: tuple[Any, ...], output: object) -> None:
        if not in_backward():
            self._end(chunk, output)

    def _begin(self, chunk: int) -> None:
        self._calls.unwind()  # an interrupt (KeyboardInterrupt, a cancelled task) runs no forward hook
        self._marks[chunk].clear()
        forward = self._timeline.begin(chunk)
        self._check_functions(micro_batch(forward.number))
        self._check_forward(forward)

    def _end(self, chunk: int, output: object) -> None:
        ended = self._timeline.end(chunk, output)
        if ended is None:
            if output is None:
                return  # its beginning was refused
            raise MicroBatchError(
                "the model was called inside its own forward",
                where=f"chunk {chunk}, {micro_batch(self._timeline.ended[chunk] - 1)}",
                expected="one forward after the other",
                got="one that began and ended in another",
                cause="a forward hook of somebody's that calls the model, for a metric or a second view",
            )
        forward, complete = ended
        if complete:
            self._witness.check(self._routers[chunk], forward.called, forward.number)
        else:
            if chunk == 0:
                self._tokens.pop(forward.number, None)
            for layer in forward.called:
                self._drop((layer, forward.number))

    def _drop(self, key: Key) -> None:
        self._witness.forget(key)
        self._pending.pop(key, None)
        self._recomputed.discard(key)
        self._forget(key)

    # The routers' hooks

    def _router_begins(
        self, router: Router, chunk: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        started = time.perf_counter()
        running = self._arm(router, chunk, _first_tensor(args, kwargs))
        if running is not None:
            running.call.inside = sys._getframe(2)  # that of the module's __call__; Hook's is between
            self._calls.stack.append(running)
        self._seconds += time.perf_counter() - started

    def _router_ends(self, router: Router, chunk: int, args: tuple[Any, ...], output: object) -> object:
        stack = self._calls.stack
        if not stack or stack[-1].module is not router.module:
            return None  # the pre-hook raised or left it alone
        started = time.perf_counter()
        mended = self._disarm(router, chunk, stack.pop(), output)
        self._seconds += time.perf_counter() - started
        return mended

    def _arm(self, router: Router, chunk: int, hidden: torch.Tensor) -> _Running | None:
        """The beginning of a router's call; None leaves it alone."""
        _refuse_batched(router, hidden)
        rows = hidden.numel() // hidden.shape[-1] * router.gathers
        verify = False
        again = self._recompute_of(router, chunk)
        if again is not None:
            choose = self._recompute(router, again, rows, hidden.device)
        else:
            forward = self._timeline.live(chunk)
            self._check_first_call(router, forward)
            forward.called.add(router.label)
            verify = self._is_checked(forward.number)
            key = router.label, forward.number
            foreseen = self._marks[chunk].take_foreseen(router.module)
            around = self._timeline.enclosing(forward) + ([] if foreseen is None else [foreseen])
            if around:
                self._await_recompute(key, around)
            choose = self._live(router, forward, rows, hidden.device)
        call = seam.Call(
            rows,
            router.num_experts,
            router.topk,
            choose,
            masks=router.masks,
            watch=router.masks or self._way[router.label] != "guard",
            verify=verify,
            keeps=self.foreign and router.drops,
            spare=router.spare,
            compares=self._compares(router),
            given=self.foreign,
        )
        return _Running(router.module, call.__enter__(), again is not None)

    def _recompute_of(self, router: Router, chunk: int) -> int | None:
        """The micro-batch that this call of the router runs again; None for a forward of its own."""
        marked = self._marks[chunk].take_announced(router.module)
        if marked is None and in_backward():
            return self._timeline.recomputed(chunk, router.label)
        return marked

    def _disarm(self, router: Router, chunk: int, running: _Running, output: object) -> object:
        """The end of a router's call; what it returns takes the place of the output, if it isn't None."""
        call = running.call
        call.__exit__()
        if output is None:
            return None  # the router raised, or its recompute was stopped early
        self._note(router, chunk, running, output)
        if self.foreign and router.mend is not None and call.ids is not None:
            return router.mend(output, call.ids)
        return None

    def _note(self, router: Router, chunk: int, running: _Running, output: object) -> None:
        call = running.call
        if call.way != self._way[router.label]:
            self._way[router.label] = call.way
            _ways[router.module] = call.way
        if running.recomputes:
            if call.way is None:
                raise RecomputeError(
                    "the recompute of this router never reached its top-k",
                    where=f"layer {router.label}, in its recompute",
                    cause=routers.explained(router, call.seen)
                    or "a recompute that takes another path than the forward",
                )
            self._witness.saw_again(call)
        else:
            self._witness.saw(router, self._timeline.live(chunk).number, call, output)

    def _recompute(self, router: Router, number: int, rows: int, device: torch.device) -> seam.Choose:
        ids = self._again(router, number, device)
        if len(ids) != rows:
            raise RecomputeError(
                "the recompute has another number of tokens than its forward",
                where=micro_batch(number, router.label),
                expected=f"{len(ids)} rows",
                got=rows,
                cause="a forward of something else that is run from a gradient hook",
            )
        self._recomputed.add((router.label, number))
        return lambda own: ids.long()

    def _await_recompute(self, key: Key, around: list[Any]) -> None:
        """Note that autograd may yet recompute this call, and forget it when the graph dies."""
        me = weakref.ref(self)

        def died(_: object) -> None:
            session = me()
            if session is not None and not session._may_recompute(key):
                session._graph_died(key)

        self._pending[key] = [weakref.ref(one, died) for one in around]

    def _may_recompute(self, key: Key) -> bool:
        return any(one() is not None for one in self._pending.get(key, ()))

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
            cause=f"{CALLED_INSIDE}; Megatron's overlap_moe_expert_parallel_comm does so too"
            if bypassed
            else "a model that runs its layers several times in one forward, one sequence after another; or "
            "a graph of before this block that MindSpeed's moe_fb_overlap runs again in it",
        )

    def _due(self) -> list[Key]:
        """The calls that autograd may yet recompute and hasn't."""
        pending = list(self._pending)
        return [key for key in pending if key not in self._recomputed and self._may_recompute(key)]

    def _check_functions(self, where: str) -> None:
        """Is the code that routes the same as when the block was entered?"""
        before, now = self._functions, routers.functions(self._all_routers())
        for name in before | now:
            if now.get(name) is not before.get(name):
                raise RouterError(
                    "the code that routes was replaced inside an open block",
                    where=f"{where}, {name}",
                    expected=described(before[name]) if name in before else "that of its class",
                    got=described(now[name]) if name in now else "that of its class",
                    cause="MindSpeed's repatch(), or another library's patch, in the middle of a block; do "
                    "it before the block or after it",
                )

    def _check_complete(self) -> None:
        """The body is through: did every chunk see the same forwards, and is nothing still to come?"""
        self._check_functions("at the end of the block")
        if (bypassed := self._timeline.bypassed) is not None:
            raise MicroBatchError(
                "the routers ran, but not through the __call__ of the module that was passed",
                where=micro_batch(bypassed.number),
                expected="each micro-batch to be one __call__ of that module",
                got="a call of its forward() or of an inner module",
                cause=CALLED_INSIDE,
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
        if int(self._witness.strayed):
            raise RecomputeError(
                "a fused router chose other experts in a recompute than in its forward",
                expected="the same ones: its kernel can't be given them",
                got="others, in one call of a router at least",
                cause="a near tie, which fell the other way; with moe_router_fusion=False a recompute takes "
                "the experts of its forward",
            )
        due = self._due()
        if due:
            gc.collect()  # a graph in a cycle of garbage is nobody's
            due = self._due()
        if due:
            layer, number = min(due, key=lambda key: (key[1], key[0]))
            raise RecomputeError(
                f"the block ended before {len(due)} router calls were recomputed; they would choose anew",
                where=micro_batch(number, layer),
                expected="backward inside the block",
                got="a graph with checkpoints that is still alive",
                cause="loss.backward() after the with block; a loss that was skipped (NaN, say) and is still "
                "held: `del loss` inside the block; or outputs kept from a forward that should have run "
                "under torch.no_grad()",
            )


def narrowed(ids: torch.Tensor, router: Router) -> torch.Tensor:
    """A narrow copy, on the device.

    Made under inference_mode it can't be saved for backward, and never is: the int64 copy at use can.
    """
    return ids.to(narrow_dtype(router.num_experts))


def _refuse_batched(router: Router, hidden: torch.Tensor) -> None:
    if torch._C._functorch.is_batchedtensor(hidden):
        raise RouterError(
            "the router runs under vmap, where its rows can't be told apart",
            where=f"layer {router.label} ({router.path or 'the module itself'})",
            expected="hidden states [..., hidden]",
            got="a batched tensor of torch.vmap",
            cause="torch.vmap, torch.func.jacrev or the like around the model; loop over the batch instead",
        )


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            return value
    raise RouterError("the router was called without a tensor", expected="hidden states", got=args)


@dataclass(frozen=True)
class OpenSession:
    """A record, replay or pin_recompute block that is open, and the decoder layers it holds."""

    name: str
    layers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} on layers {', '.join(map(str, self.layers))}"


def open_sessions() -> tuple[OpenSession, ...]:
    """The blocks that are open in this process."""
    blocks = {id(block): block for block in list(_sessions.values())}
    return tuple(
        OpenSession(block.name, tuple(sorted(router.label for router in block._all_routers())))
        for block in blocks.values()
    )
