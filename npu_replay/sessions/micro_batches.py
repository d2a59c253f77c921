"""Which micro-batch is running, and whose recompute a call inside backward is.

One micro-batch is one `__call__` of a model chunk. Whatever encloses that call, or a router's call in it, and
may run it again (`recompute.enclosing`) is noted with it: a checkpoint around the loss, one around several
layers and one around each of them may all enclose the same call. A recompute is led back by the innermost of
them that runs it.

Where nothing that was noted runs, as in a tensor's hook, the number of autograd's running node tells: the
counter is noted at the end of each forward, and the number falls between two notes. Ends and not starts are
noted: a reentrant checkpoint around the whole model makes its node before the model's forward begins.

A schedule that runs a layer again by itself, outside backward, between the forwards of other micro-batches,
looks like a forward; so the compat module that knows the place marks it (`Marks`).
"""

from __future__ import annotations

import bisect
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

from npu_replay.errors import MicroBatchError, RecomputeError, micro_batch
from npu_replay.sessions import recompute

CALLED_INSIDE = (
    "the block was given a wrapper, and the loop calls the module inside it (model.module, say) or forward() "
    "itself, past the __call__ of what was given; give the block the module that the loop really calls"
)

Owner: TypeAlias = "tuple[int, int]"  # chunk, micro-batch
Key: TypeAlias = "tuple[int, int]"  # layer label, micro-batch


@dataclass
class Forward:
    """One forward of one chunk, while it runs."""

    chunk: int
    number: int
    grad: bool
    made: int
    enclosing: list[Any]
    handling: BaseException | None
    called: set[int] = field(default_factory=set)
    """Layer labels of the routers called so far."""
    checked: bool = False
    """Is it seen to that the routers' outputs show the ids?"""


class Timeline:
    """Numbers the forwards of each chunk and remembers where they ended."""

    def __init__(self, chunks: int) -> None:
        """Begins with the block: what was made before it is none of ours."""
        self.ended = [0] * chunks
        self.bypassed: Forward | None = None
        self.had_grad = False
        self._open: list[Forward | None] = [None] * chunks
        self._ends: list[tuple[int, Owner | None]] = []
        self._thread: int | None = None
        self._start = (threading.get_ident(), recompute.sequence_number())
        self._noted: WeakKeyDictionary[Any, set[Owner]] = WeakKeyDictionary()

    def begin(self, chunk: int) -> Forward:
        """A chunk's forward starts; one that was left by an exception is dropped."""
        self._check_thread(chunk)
        if (left := self._open[chunk]) is not None:  # by an interrupt, which runs no forward hook
            self._withdraw(left)
        grad = torch.is_grad_enabled()
        self.had_grad |= grad
        enclosing = recompute.enclosing(functions=not grad)
        made = recompute.sequence_number()
        forward = Forward(chunk, self.ended[chunk], grad, made, enclosing, sys.exc_info()[1])
        self._note(enclosing, (chunk, forward.number))
        self._open[chunk] = forward
        return forward

    def end(self, chunk: int, output: object) -> tuple[Forward, bool] | None:
        """A chunk's forward is over; return it, and whether it came to its end. None if it never began.

        A forward hook that is always called gets None after an exception, and runs while it is handled.
        """
        forward = self._open[chunk]
        if forward is None:
            return None
        self._open[chunk] = None
        raised = output is None and sys.exc_info()[1] is not forward.handling
        self._ends.append((recompute.sequence_number(), None if raised else (chunk, forward.number)))
        if raised:
            self._withdraw(forward)
        else:
            self.ended[chunk] += 1
        forward.enclosing.clear()
        return forward, not raised

    def live(self, chunk: int) -> Forward:
        """The forward that a router's call outside backward belongs to."""
        forward = self._open[chunk]
        if forward is not None:
            return forward
        if self.bypassed is None or self.bypassed.chunk != chunk:
            self._check_thread(chunk)
            made = recompute.sequence_number()
            self.bypassed = Forward(chunk, self.ended[chunk], torch.is_grad_enabled(), made, [], None)
        return self.bypassed

    def number(self, chunk: int) -> int:
        """The micro-batch whose forward a chunk runs now."""
        return self.live(chunk).number

    def enclosing(self, forward: Forward) -> list[Any]:
        """All that may run the router's call again that begins now, alive as long as it may."""
        # Where grad was off as the forward began, nodes that were made since say that it was turned on.
        grows = forward.grad or recompute.sequence_number() != forward.made
        inner = recompute.enclosing(functions=grows and not torch.is_grad_enabled())
        if not inner:
            return forward.enclosing
        self._note(inner, (forward.chunk, forward.number))
        return forward.enclosing + inner

    def recomputed(self, chunk: int, layer: int) -> int:
        """The number of the micro-batch whose recompute a router's call inside backward is."""
        owner = self._owner(chunk, f"layer {layer}")
        # A checkpoint that this recompute makes anew may run on another thread, without the outer one.
        self._note(recompute.enclosing(functions=not torch.is_grad_enabled()), owner)
        return owner[1]

    def forget(self) -> None:
        """Drop all ends but the last: no graph made before it can recompute any more."""
        del self._ends[:-1]

    def _note(self, enclosing: list[Any], owner: Owner) -> None:
        for one in enclosing:
            self._noted.setdefault(one, set()).add(owner)

    def _withdraw(self, forward: Forward) -> None:
        """A forward was left by an exception: its number is the next one's, its recomputes are nobody's."""
        for owners in self._noted.values():
            owners.discard((forward.chunk, forward.number))

    def _owner(self, chunk: int, where: str) -> Owner:
        """The chunk and micro-batch whose forward is run again."""
        if (problem := recompute.probe()) is not None:
            raise RecomputeError(
                f"on torch {torch.__version__} a recompute can't be led back to its forward ({problem})",
                where=f"{where}, in backward",
                cause="what the brackets name: a broken package that torch imports, a patched checkpoint, "
                "or a torch that npu_replay doesn't know; mend it, or turn activation recompute off",
            )
        owners = self._owners_on_stack(chunk)
        if len(owners) > 1:
            raise RecomputeError(
                "one checkpoint holds several forwards of the model, and their recomputes look alike",
                where=f"{where}, in backward",
                expected="a checkpoint for each forward",
                got=f"{len(owners)} forwards in one",
                cause="checkpoint() around a loop over micro-batches",
            )
        return self._checked(owners.pop() if owners else self._owner_by_number(where), chunk, where)

    def _owners_on_stack(self, chunk: int) -> set[Owner]:
        """The forwards in what runs again now: in the innermost of it that was noted."""
        found = (
            {owner for owner in self._noted.get(one, ()) if owner[0] == chunk}
            for one in recompute.recomputing()
        )
        return next(filter(None, found), set())

    def _owner_by_number(self, where: str) -> Owner | None:
        """The chunk and micro-batch in whose forward the running node was made."""
        number = recompute.running_node_number()
        if number is None:
            raise RecomputeError(
                f"{where} was run in backward, but by no node of the model's graph",
                where="in backward",
                cause="a forward run from a gradient hook or from an engine callback",
            )
        if number < self._start[1]:
            return None
        at = bisect.bisect_right(self._ends, number, key=lambda end: end[0])
        return self._ends[at][1] if at < len(self._ends) else self._running()

    def _checked(self, owner: Owner | None, chunk: int, where: str) -> Owner:
        if owner is not None and owner[0] == chunk:
            return owner
        raise RecomputeError(
            "this recompute belongs to no forward of this block",
            where=f"{where}, in backward",
            expected=f"one of {self.ended[chunk]} micro-batches of chunk {chunk}",
            got="a forward that raised, ran before the block, or went past the model's __call__"
            if owner is None
            else f"micro-batch {owner[1]} of chunk {owner[0]}",
            cause="forward and backward are not in the same block"
            if self.bypassed is None
            else CALLED_INSIDE,
        )

    def _running(self) -> Owner | None:
        running = [forward for forward in self._open if forward is not None]
        return (running[0].chunk, running[0].number) if len(running) == 1 else None

    def _check_thread(self, chunk: int) -> None:
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
            if thread != self._start[0]:  # numbers are a thread's own
                self._start = thread, recompute.sequence_number()
        if thread != self._thread:
            raise MicroBatchError(
                "the forwards of one block come from two threads",
                where=f"chunk {chunk}, {micro_batch(self.ended[chunk])}",
                expected=f"thread {self._thread}",
                got=f"thread {thread}",
                cause="a model called from a thread pool; micro-batches can't be put in order there",
            )


class Marks:
    """What is known of the next call of each router of one chunk.

    Args:
        running: the number of the micro-batch whose forward this chunk runs now.
    """

    def __init__(self, running: Callable[[], int]) -> None:
        self.running = running
        self._foreseen: dict[int, Any] = {}
        self._announced: dict[int, int] = {}

    def foresee(self, router: nn.Module, token: object) -> None:
        """The router's next forward may be run again as long as `token` lives (it takes weak references)."""
        self._foreseen[id(router)] = token

    def announce(self, router: nn.Module, number: int) -> None:
        """The router's next call is the recompute of micro-batch `number`."""
        self._announced[id(router)] = number

    def take_foreseen(self, router: nn.Module) -> Any:
        """The token of `foresee`, once."""
        return self._foreseen.pop(id(router), None) if self._foreseen else None

    def take_announced(self, router: nn.Module) -> int | None:
        """The number of `announce`, once."""
        return self._announced.pop(id(router), None) if self._announced else None

    def clear(self) -> None:
        """Drop what no call has taken: an exception came between."""
        self._foreseen.clear()
        self._announced.clear()
