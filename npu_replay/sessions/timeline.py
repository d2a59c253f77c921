"""Find the running micro-batch, and the one whose forward a recompute repeats.

One micro-batch is one `__call__` of a model chunk. Whatever encloses its forward, or a router's call in it,
and may run it again (`backward.enclosing`) is noted: checkpoints around the loss, several layers and each
layer may all enclose one call. The innermost noted one that runs now tells a recompute's forward. Where none
runs, as in a tensor's hook, autograd's running node does: its number falls between the counters noted at the
ends of two forwards. Ends, since a reentrant checkpoint around the model makes its node before the forward.
A schedule that recomputes outside backward looks like a forward, so a compat module marks it (`Marks`).
"""

from __future__ import annotations

import bisect
import sys
import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from npu_replay.errors import CALLED_INSIDE, MicroBatchError, RecomputeError, micro_batch
from npu_replay.seam import backward
from npu_replay.sessions.micro_batch import MicroBatch, place_of


class Timeline:
    """Numbers the micro-batches of each chunk since the block opened, and finds that of each recompute."""

    def __init__(self, chunks: int) -> None:
        self.ended = [0] * chunks  # how many forwards of each chunk
        # With autograd's sequence number after each forward; ascending, so that a node is found by bisection.
        self.ends: list[tuple[int, MicroBatch]] = []
        self._open: list[MicroBatch | None] = [None] * chunks
        self._thread: int | None = None
        self._opened_on = threading.get_ident()
        self._since = backward.sequence_number()  # nodes below are older than the block
        # Weak keys: a checkpoint is freed with its graph, and the block must not keep it alive.
        self._noted: WeakKeyDictionary[Any, set[MicroBatch]] = WeakKeyDictionary()

    def begin(self, chunk: int) -> MicroBatch:
        """Begin a chunk's forward; one that an interrupt left open, which runs no hook, has raised."""
        self._check_thread(chunk)
        if (left := self._open[chunk]) is not None:
            self._end(left, raised=True)
        grad = torch.is_grad_enabled()
        enclosing = backward.enclosing(functions=not grad)
        made = backward.sequence_number()
        chunks = len(self.ended)
        begun = MicroBatch(chunk, self.ended[chunk], chunks, grad, made, enclosing, sys.exc_info()[1])
        self._note(enclosing, begun)
        self._open[chunk] = begun
        return begun

    def running(self, chunk: int) -> MicroBatch | None:
        return self._open[chunk]

    def end(self, chunk: int, output: object) -> MicroBatch | None:
        """End a chunk's forward and return it. None if it never began."""
        ended = self._open[chunk]
        if ended is None or threading.get_ident() != self._thread:
            return None  # a second thread's forward was refused
        # A hook that is always called gets None after an exception, and runs while that is handled.
        self._end(ended, raised=output is None and sys.exc_info()[1] is not ended.handling)
        self.ended[chunk] += not ended.has_raised
        return ended

    def _end(self, ended: MicroBatch, *, raised: bool) -> None:
        self._open[ended.chunk] = None
        ended.is_open = False
        ended.has_raised = raised
        self.ends.append((backward.sequence_number(), ended))
        ended.enclosing = ()
        ended.handling = None
        if raised:
            ended.forget_calls()

    def live(self, chunk: int, layer: int) -> MicroBatch:
        """Return the micro-batch of a router's call outside backward; MicroBatchError if none runs."""
        running = self._open[chunk]
        if running is None:
            raise MicroBatchError(
                "a router ran, but not through the __call__ of the module that was passed",
                where=micro_batch(self.ended[chunk], layer),
                cause=f"{CALLED_INSIDE}; Megatron's overlap_moe_expert_parallel_comm does so too",
            )
        return running

    def enclosing(self, running: MicroBatch) -> list[Any]:
        """Return the checkpoints around the router call that starts now; each lives as long as it may run."""
        # If grad was off when the forward began, nodes made since show that it was turned on.
        grows = running.grad or backward.sequence_number() != running.made
        inner = backward.enclosing(functions=grows and not torch.is_grad_enabled())
        self._note(inner, running)
        return [*running.enclosing, *inner]

    def recomputed(self, chunk: int, layer: int) -> MicroBatch:
        """Return the micro-batch that a router's call inside backward recomputes.

        Raises:
            RecomputeError: it is none of this block, or can't be determined.
        """
        where = f"layer {layer}, in backward"
        if (problem := backward.probe()) is not None:
            problem = f"on torch {torch.__version__} the forward of a recompute can't be found ({problem})"
            raise RecomputeError(
                problem,
                where=where,
                cause=(
                    "what the brackets name: a broken package that torch imports, a patched checkpoint, or a "
                    "torch that npu_replay doesn't know; mend it, or turn activation recompute off"
                ),
            )
        repeated = (
            [noted for noted in self._noted.get(around, ()) if noted.chunk == chunk and not noted.has_raised]
            for around in backward.recomputing()
        )
        forwards = next(filter(None, repeated), [])  # of the innermost noted checkpoint that runs again
        if len(forwards) > 1:
            raise RecomputeError(
                "one checkpoint holds several forwards of the model, and their recomputes look alike",
                where=where,
                expected="a checkpoint for each forward",
                got=f"{len(forwards)} forwards in one",
                cause="checkpoint() around a loop over micro-batches",
            )
        owner = forwards[0] if forwards else self._by_number(where)
        if owner is None or owner.chunk != chunk:
            got = "a forward that raised or ran before the block"
            if owner is not None:
                got = owner.place
            raise RecomputeError(
                "this recompute belongs to no forward of this block",
                where=where,
                expected=f"one of the {self.ended[chunk]} micro-batches that have run",
                got=got,
                cause="forward and backward are not in the same block",
            )
        # Backward of a checkpoint that this recompute makes may run on a thread without the outer one.
        self._note(backward.enclosing(functions=not torch.is_grad_enabled()), owner)
        return owner

    def called_again(self, label: int, running: MicroBatch) -> MicroBatchError:
        """Return the error for a router that a forward calls twice: routes have a column for each router."""
        return MicroBatchError(
            "the router is called again before the forward of the model that was passed has ended",
            where=micro_batch(running.number, label),
            cause=(
                "a looped model, which runs layers several times in one forward (Inkling-2) and can't be "
                "replayed; a model that runs one sequence after another; layers that share one router; "
                "MindSpeed's moe_fb_overlap, which runs a graph of before this block again"
            ),
        )

    def forget(self, oldest: MicroBatch | None) -> None:
        """Drop the ends of forwards before the oldest that a graph can recompute; None drops all."""
        gone = next((at for at, (_, forward) in enumerate(self.ends) if forward is oldest), len(self.ends))
        if gone:
            self._since = self.ends[gone - 1][0]
            del self.ends[:gone]

    def let_go(self) -> None:
        """Drop what is kept of every forward: no recompute comes any more."""
        ended = [forward for _, forward in self.ends]
        for forward in filter(None, (*ended, *self._open)):
            forward.forget_calls()
            forward.let_go()
        self.ends.clear()

    def _by_number(self, where: str) -> MicroBatch | None:
        """Return the forward between whose neighbours' ends the running node was made; None if of none."""
        number = backward.running_node_number()
        if number is None:
            raise RecomputeError(
                "a forward was run in backward, but by no node of the model's graph",
                where=where,
                cause="a forward run from a gradient hook or from an engine callback",
            )
        if number < self._since:
            return None
        at = bisect.bisect_right(self.ends, number, key=lambda end: end[0])
        if at < len(self.ends):
            forward = self.ends[at][1]
            return None if forward.has_raised else forward
        running = [open_forward for open_forward in self._open if open_forward is not None]
        return running[0] if len(running) == 1 else None

    def _note(self, enclosing: list[Any], running: MicroBatch) -> None:
        for enclosing_object in enclosing:
            self._noted.setdefault(enclosing_object, set()).add(running)

    def _check_thread(self, chunk: int) -> None:
        """Refuse a second thread: each has sequence numbers of its own, which order nothing between two."""
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
            if thread != self._opened_on:
                self._since = backward.sequence_number()
        if thread != self._thread:
            raise MicroBatchError(
                "the forwards of one block come from two threads",
                where=place_of(self.ended[chunk], chunk, len(self.ended)),
                cause="a model called from a thread pool; micro-batches can't be put in order there",
            )


class Marks:
    """Holds what is known of the next call of each router of one chunk."""

    def __init__(self, timeline: Timeline, chunk: int) -> None:
        self.timeline = timeline
        self.chunk = chunk
        self._foreseen: dict[int, Any] = {}
        self._announced: dict[int, MicroBatch | None] = {}
        self.any = False  # something is known

    def running(self) -> MicroBatch | None:
        return self.timeline.running(self.chunk)

    def foresee(self, router: nn.Module, token: object) -> None:
        """Note that the router's next forward may be run again while `token` lives; it is held weakly."""
        self._foreseen[id(router)] = token
        self.any = True

    def announce(self, router: nn.Module, repeated: MicroBatch | None) -> None:
        """Note that the router's next call is a recompute of this micro-batch, if it is one."""
        self._announced[id(router)] = repeated
        self.any = True

    def take_foreseen(self, router: nn.Module) -> Any:
        return self._foreseen.pop(id(router), None) if self._foreseen else None

    def take_announced(self, router: nn.Module) -> MicroBatch | None:
        return self._announced.pop(id(router), None) if self._announced else None

    def clear(self) -> None:
        """Drop what no call has taken, because of an exception in between."""
        self._foreseen.clear()
        self._announced.clear()
        self.any = False
