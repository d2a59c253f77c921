"""Session: what record, replay and pin_recompute have in common: they answer the routers' top-k.

What it keeps is keyed by (layer, micro-batch), never appended to a list, so a forward that raised and is
tried again, or a recompute in any order, finds its own.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch

from npu_replay import routers
from npu_replay.errors import RecomputeError, ReplayError, RouterError, micro_batch
from npu_replay.routers import Model, Router
from npu_replay.routes.inputs import Called
from npu_replay.sessions import compiled, seam
from npu_replay.sessions.block import Block
from npu_replay.sessions.effect import Witness, is_due
from npu_replay.sessions.hooks import Hook, restore_functions
from npu_replay.sessions.micro_batches import Forward, Marks
from npu_replay.sessions.recompute import Key, Recomputes
from npu_replay.sessions.router_calls import RouterCalls

_sessions: WeakValueDictionary[int, Session] = WeakValueDictionary()
"""The open session of each router, by id: one router has one."""


class Session(Block):
    """Answers the top-k of every router of a model, in each forward and in its recompute."""

    name = "session"
    foreign = False
    """May routers be given ids that they would not have chosen?"""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._calls: list[RouterCalls] = []
        self._witness = Witness()
        self._pending = Recomputes(functools.partial(_released, weakref.ref(self)))
        self._kept: dict[Key, torch.Tensor] = {}
        self._tokens: dict[int, Called] = {}
        self._chunk_of: dict[int, int] = {}
        self._seconds = 0.0

    # What a kind of session decides

    def _answers(self, router: Router) -> bool:
        """Are the router's calls outside backward answered now?"""
        return True

    def _check_forward(self, forward: Forward) -> None:
        """Refuse a micro-batch at its beginning."""

    def _prepare(self, router: Router, forward: Forward, rows: int, device: torch.device) -> Any:
        """What `_choose` will find in `call.routes`; refuses what doesn't fit the call."""

    def _choose(self, call: seam.Call) -> torch.Tensor:
        """The ids of a router's call in a forward, int64 [rows, topk]."""
        raise NotImplementedError

    def _choose_again(self, call: seam.Call) -> torch.Tensor:
        """The same in a recompute: what its forward chose."""
        ids: torch.Tensor = call.routes
        return ids.long()

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

    def _tokens_wanted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called | None:
        """Token ids and images of this call of the first chunk, held against its routes; None for none."""
        return None

    def _is_checked(self, number: int) -> bool:
        """Is the effect checked in this micro-batch?"""
        return is_due(number)

    def _forget(self, key: Key) -> None:
        """The forward of this call raised: drop what was kept."""
        self._kept.pop(key, None)

    def _release(self, key: Key) -> None:
        """The graph of this call is gone: drop what was kept for its recompute."""
        self._kept.pop(key, None)

    # Figures

    def metrics(self) -> dict[str, float]:
        """Plain numbers for any tracker: micro-batches, routers, seconds spent here.

        Where tokens over an expert's capacity are dropped also capacity_dropped, the share of chosen experts
        that lost their token, in the micro-batches whose outputs are checked (0, 1, 2, 4, 8, ...).
        """
        figures = {"micro_batches": self._done(), "routers": self._count, "seconds": self._seconds}
        counted = self.counts()
        if counted["chosen"]:
            figures["capacity_dropped"] = counted["dropped"] / counted["chosen"]
        return figures

    def counts(self) -> dict[str, int]:
        """The whole numbers behind `metrics`, which ranks can add up. Waits for the device."""
        entered = self._state != "new"
        ReplayError.unless(entered, f"the {self.name} block was never entered", "with ... as session:", self)
        return {
            "routers": self._count,
            "microseconds": int(self._seconds * 1e6),
            "dropped": int(self._witness.dropped),
            "chosen": self._witness.chosen,
        }

    # The block

    def _check_model(self) -> None:
        self._chunk_of = {one.label: chunk for chunk, found in enumerate(self._routers) for one in found}
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
        block = self._undo
        block.callback(compiled.let_go, block)
        compiled.hold_eager(self._chunks, self._routers, block)
        block.callback(seam.guard.remove, block)
        seam.guard.install(block)
        block.callback(seam.unwind, block)
        block.callback(restore_functions, torch._C._is_torch_function_enabled())
        super()._attach()
        for name, owner, attribute in routers.functions(self._all_routers()):
            self._unchanged.hold(name, vars(owner), attribute)

    def _attach_router(self, router: Router, chunk: int, marks: Marks) -> None:
        module = router.module
        calls = RouterCalls(self, router, chunk, marks)
        self._calls.append(calls)
        self._undo.callback(_sessions.pop, id(module), None)
        _sessions[id(module)] = self
        self._before(module, Hook(calls, self._may_wait(RouterCalls.begins), module))
        calls.last = Hook(calls, self._may_wait(RouterCalls.ends), module)
        self._after(module, calls.last)

    def _clear(self) -> None:
        """Keep neither the model nor ids that only a recompute would want."""
        super()._clear()
        self._calls.clear()
        for kept in (self._witness, self._pending, self._kept, self._tokens):
            kept.clear()

    # Its forwards

    def _begin(self, chunk: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward:
        if seam.is_running():
            seam.unwind(self._undo)
        self._pending.settle()
        if (left := self._timeline.running(chunk)) is not None:  # by an interrupt, which runs no forward hook
            self._abandon(left)
        self._witness.check_ids()
        forward = super()._begin(chunk, args, kwargs)
        forward.checked = self._is_checked(forward.number)
        self._check_forward(forward)
        if chunk == 0 and (tokens := self._tokens_wanted(args, kwargs)) is not None:
            self._tokens[forward.number] = tokens
        return forward

    def _end(self, chunk: int, output: object) -> tuple[Forward, bool] | None:
        ended = super()._end(chunk, output)
        self._pending.settle()
        if ended is None:
            return None
        forward, complete = ended
        if complete:
            self._witness.check(self._routers[chunk], forward)
            if self._pending:
                self._check_in_backward(output, forward.number)
            return ended
        if chunk == 0:
            self._tokens.pop(forward.number, None)
        self._abandon(forward)
        return ended

    def _abandon(self, forward: Forward) -> None:
        """Forget the calls of a forward that raised, or was interrupted."""
        for layer in forward.called:
            key = layer, forward.number
            self._witness.forget(key)
            self._pending.drop(key)
            self._forget(key)

    def _check_in_backward(self, output: object, number: int) -> None:
        """Check the places of the routers again when backward begins, with the nodes of the output."""
        session = weakref.ref(self)

        def begins(_: object) -> None:
            if (alive := session()) is not None:
                alive._may_wait(alive._unchanged.check)(f"{micro_batch(number)}, in backward")

        parts = [*output.values()] if isinstance(output, Mapping) else output
        for part in parts if isinstance(parts, list | tuple) else [parts]:
            if isinstance(part, torch.Tensor) and part.grad_fn is not None:
                part.grad_fn.register_prehook(begins)

    def _forget_ends(self) -> None:
        """Keep the ends of those forwards alone that autograd may yet run again."""
        oldest = self._pending.oldest
        self._timeline.forget(None if oldest is None else (self._chunk_of[oldest[0]], oldest[1]))

    def _check_complete(self) -> None:
        """Also: is nothing still to come?"""
        super()._check_complete()
        self._witness.check_ids()
        due = self._pending.due()
        if due:
            gc.collect()  # a graph in a cycle of garbage is nobody's
            due = self._pending.due()
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


def _released(session: weakref.ref[Session], key: Key) -> None:
    if (alive := session()) is not None:
        alive._release(key)


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
