"""Which micro-batch is running, and whose recompute a call inside backward is.

One micro-batch is one `__call__` of a model chunk. At the end of each the counter of autograd's sequence
numbers is noted; the node that runs in backward then falls between two notes. Ends and not starts are
noted: a checkpoint around the whole model makes its node before the model's forward begins.
"""

from __future__ import annotations

import bisect
import sys
import threading
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch

from npu_replay import recompute
from npu_replay.errors import MicroBatchError, RecomputeError, micro_batch


@dataclass
class Forward:
    """One forward of one chunk, while it runs."""

    chunk: int
    number: int
    grad: bool
    enclosing: weakref.ref[Any] | None
    handling: BaseException | None
    called: dict[int, int] = field(default_factory=dict)
    """Rows by layer label, of the routers called so far."""

    def pending(self) -> weakref.ref[Any] | None:
        """The checkpoint that the router being called sits in, if its backward may recompute it."""
        if torch.is_grad_enabled():
            return recompute.non_reentrant_checkpoint()
        if self.enclosing is not None:
            return self.enclosing
        return recompute.reentrant_checkpoint() if self.grad else None


class Timeline:
    """Numbers the forwards of each chunk and remembers where they ended."""

    def __init__(self, chunks: int) -> None:
        """Begins with the block: what this thread made before it is none of ours."""
        self.ended = [0] * chunks
        self.bypassed: Forward | None = None
        self._open: list[Forward | None] = [None] * chunks
        self._ends: list[int] = []
        self._owners: list[tuple[int, int] | None] = []
        self._thread: int | None = None
        self._start = (threading.get_ident(), recompute.sequence_number())

    def begin(self, chunk: int) -> Forward:
        """A chunk's forward starts; one that was left by an exception is dropped."""
        self._check_thread(chunk)
        grad = torch.is_grad_enabled()
        enclosing = None if grad else recompute.reentrant_checkpoint()
        forward = Forward(chunk, self.ended[chunk], grad, enclosing, sys.exc_info()[1])
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
        self._ends.append(recompute.sequence_number())
        self._owners.append(None if raised else (chunk, forward.number))
        if not raised:
            self.ended[chunk] += 1
        return forward, not raised

    def live(self, chunk: int) -> Forward:
        """The forward that a router's call outside backward belongs to."""
        forward = self._open[chunk]
        if forward is not None:
            return forward
        if self.bypassed is None or self.bypassed.chunk != chunk:
            self._check_thread(chunk)
            self.bypassed = Forward(chunk, self.ended[chunk], torch.is_grad_enabled(), None, None)
        return self.bypassed

    def recomputed(self, chunk: int, layer: int) -> int:
        """The number of the micro-batch whose recompute a router's call inside backward is."""
        where = f"layer {layer}, in backward"
        if (problem := recompute.probe()) is not None:
            raise RecomputeError(
                f"on torch {torch.__version__} a recompute can't be led back to its forward ({problem})",
                where=where,
                cause="a torch release that npu_replay doesn't know; turn activation recompute off",
            )
        number = recompute.running_node_number()
        if number is None:
            raise RecomputeError(
                "the router was called in backward, but by no node of the model's graph",
                where=where,
                cause="a forward run from a gradient hook or from an engine callback",
            )
        owner = self._owner(number)
        if owner is None or owner[0] != chunk:
            raise RecomputeError(
                "this recompute belongs to no forward of this block",
                where=where,
                expected=f"one of {self.ended[chunk]} micro-batches of chunk {chunk}",
                got="a forward that raised, ran before the block, or went past the model's __call__"
                if owner is None
                else f"micro-batch {owner[1]} of chunk {owner[0]}",
                cause="forward and backward are not in the same block",
            )
        return owner[1]

    def forget(self) -> None:
        """Drop all ends but the last: no graph made before it can recompute any more."""
        del self._ends[:-1], self._owners[:-1]

    def _owner(self, number: int) -> tuple[int, int] | None:
        """The chunk and micro-batch whose forward made the node of this number."""
        thread, start = self._start
        if number < start and thread == self._thread:
            return None
        at = bisect.bisect_right(self._ends, number)
        return self._owners[at] if at < len(self._owners) else self._running()

    def _running(self) -> tuple[int, int] | None:
        running = [forward for forward in self._open if forward is not None]
        return (running[0].chunk, running[0].number) if len(running) == 1 else None

    def _check_thread(self, chunk: int) -> None:
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
        if thread != self._thread:
            raise MicroBatchError(
                "the forwards of one block come from two threads",
                where=f"chunk {chunk}, {micro_batch(self.ended[chunk])}",
                expected=f"thread {self._thread}",
                got=f"thread {thread}",
                cause="a model called from a thread pool; micro-batches can't be put in order there",
            )
