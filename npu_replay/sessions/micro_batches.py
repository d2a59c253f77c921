"""Which micro-batch is running.

One micro-batch is one `__call__` of a model chunk. `recompute.Owners` leads back to it what autograd runs
again.

A schedule that runs a layer again by itself, outside backward, between the forwards of other micro-batches,
looks like a forward; so the compat module that knows the place marks it (`Marks`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from npu_replay.errors import MicroBatchError, RecomputeError, micro_batch
from npu_replay.sessions import backward
from npu_replay.sessions.recompute import Owner, Owners

CALLED_INSIDE = (
    "the block was given a wrapper, and the loop calls the module inside it (model.module, say) or forward() "
    "itself, past the __call__ of what was given; give the block the module that the loop really calls"
)


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
    ended: list[Any] = field(default_factory=list)
    """Of each router's call that has ended: the router, the ids, what it got as ids, and how often that had
    been written into."""
    checked: bool = False
    """Is the whole effect checked, and not only that the outputs show the ids?"""


class Timeline:
    """Numbers the forwards of each chunk and remembers where they ended."""

    def __init__(self, chunks: int) -> None:
        """Begins with the block: what was made before it is none of ours."""
        self.ended = [0] * chunks
        self.bypassed: Forward | None = None
        self.had_grad = False
        self._open: list[Forward | None] = [None] * chunks
        self._thread: int | None = None
        self._opened_on = threading.get_ident()
        self._owners = Owners()

    def begin(self, chunk: int) -> Forward:
        """A chunk's forward starts; one that was left by an exception is dropped."""
        self._check_thread(chunk)
        if (left := self.running(chunk)) is not None:  # by an interrupt, which runs no forward hook
            self._owners.withdraw((left.chunk, left.number))
        grad = torch.is_grad_enabled()
        self.had_grad |= grad
        enclosing = backward.enclosing(functions=not grad)
        made = backward.sequence_number()
        forward = Forward(chunk, self.ended[chunk], grad, made, enclosing, sys.exc_info()[1])
        self._owners.note(enclosing, (chunk, forward.number))
        self._open[chunk] = forward
        return forward

    def running(self, chunk: int) -> Forward | None:
        """The forward of a chunk that has begun and not ended."""
        return self._open[chunk]

    def end(self, chunk: int, output: object) -> tuple[Forward, bool] | None:
        """A chunk's forward is over; return it, and whether it came to its end. None if it never began.

        A forward hook that is always called gets None after an exception, and runs while it is handled.
        """
        forward = self._open[chunk]
        if forward is None:
            return None
        self._open[chunk] = None
        raised = output is None and sys.exc_info()[1] is not forward.handling
        self._owners.end(None if raised else (chunk, forward.number))
        if raised:
            self._owners.withdraw((chunk, forward.number))
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
            made = backward.sequence_number()
            self.bypassed = Forward(chunk, self.ended[chunk], torch.is_grad_enabled(), made, [], None)
        return self.bypassed

    def number(self, chunk: int) -> int:
        """The micro-batch whose forward a chunk runs now."""
        return self.live(chunk).number

    def enclosing(self, forward: Forward) -> list[Any]:
        """All that may run the router's call again that begins now, alive as long as it may."""
        # Where grad was off as the forward began, nodes that were made since say that it was turned on.
        grows = forward.grad or backward.sequence_number() != forward.made
        inner = backward.enclosing(functions=grows and not torch.is_grad_enabled())
        if not inner:
            return forward.enclosing
        self._owners.note(inner, (forward.chunk, forward.number))
        return forward.enclosing + inner

    def recomputed(self, chunk: int, layer: int) -> int:
        """The number of the micro-batch whose recompute a router's call inside backward is.

        Raises:
            RecomputeError: it is none of this block, or can't be told.
        """
        where = f"layer {layer}, in backward"
        owner = self._owners.find(chunk, where, self._running())
        if owner is None or owner[0] != chunk:
            raise RecomputeError(
                "this recompute belongs to no forward of this block",
                where=where,
                expected=f"one of {self.ended[chunk]} micro-batches of chunk {chunk}",
                got="a forward that raised, ran before the block, or went past the model's __call__"
                if owner is None
                else f"micro-batch {owner[1]} of chunk {owner[0]}",
                cause="forward and backward are not in the same block"
                if self.bypassed is None
                else CALLED_INSIDE,
            )
        # A checkpoint that this recompute makes anew may run on another thread, without the outer one.
        self._owners.note(backward.enclosing(functions=not torch.is_grad_enabled()), owner)
        return owner[1]

    def forget(self, oldest: Owner | None) -> None:
        """No graph of a forward before `oldest` can recompute any more; None: of none until now."""
        self._owners.forget(oldest)

    def _running(self) -> Owner | None:
        running = [forward for forward in self._open if forward is not None]
        return (running[0].chunk, running[0].number) if len(running) == 1 else None

    def _check_thread(self, chunk: int) -> None:
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
            if thread != self._opened_on:  # numbers are a thread's own
                self._owners.since = backward.sequence_number()
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
