"""Block: what every block on a model has in common: it is entered once, hangs hooks, and leaves no trace."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from torch import nn

from npu_replay import routers
from npu_replay.errors import MicroBatchError, ReplayError, micro_batch
from npu_replay.routers import Model, Router, check_alike, chunks_of, find
from npu_replay.sessions.backward import in_backward
from npu_replay.sessions.hooks import Hook
from npu_replay.sessions.micro_batches import CALLED_INSIDE, Forward, Marks, Timeline
from npu_replay.sessions.unchanged import Unchanged

logger = logging.getLogger(__name__)

_B = TypeVar("_B", bound="Block")


class Undo:
    """What a block has to undo, the last first. An interrupt may come in between: then it is closed again.

    Nothing in it may hold the block, whose death closes it, or mind being done twice.
    """

    def __init__(self) -> None:
        self._acts: list[Callable[[], object]] = []

    def callback(self, act: Callable[..., object], *args: Any) -> None:
        """Add what is to be done, before that which it undoes is done."""
        self._acts.append(functools.partial(act, *args))

    def close(self) -> None:
        """Undo everything."""
        while self._acts:
            self._acts[-1]()
            self._acts.pop()


def to_enter(block: _B) -> _B:
    """Return the block, which logs a WARNING if it is dropped, or the process ends, before it was entered."""
    text = "[npu_replay] %s() was called, but its block was never entered: with npu_replay.%s(...):"
    block._unentered = weakref.finalize(block, logger.warning, text, block.name, block.name)
    return block


class Block:
    """Hooks on the chunks and the routers of a model. Use it as a context manager, once.

    Args:
        model: a module, or the list of its virtual-pipeline chunks. One micro-batch is one `__call__`
            of the module (of every chunk).
    """

    name = "block"
    goes_first = True
    """Are its hooks next to the forward, inside of all others? A top-k of other hooks isn't the router's."""
    errors_wait = False
    """Does its first error wait until it is left? A rank that raises in the middle of a schedule leaves the
    others in a collective until its timeout. So it goes on with the routers' own choices, and raises when the
    schedule is over: before an optimizer steps."""
    puts_together = True
    """Is what all routers choose put into one RoutedExperts?"""
    failed: ReplayError | None = None
    """The error that waits."""
    _unentered: weakref.finalize[..., Any] | None = None

    def __init__(self, model: Model) -> None:
        self._chunks = chunks_of(model)
        self._timeline = Timeline(len(self._chunks))
        self._routers: list[list[Router]] = []
        self._marks: list[Marks] = []
        self._unchanged = Unchanged((), ())
        self._undo = Undo()
        self._count = 0
        self._state = "new"

    def __repr__(self) -> str:
        states = {"new": "not entered", "open": f"open on {self._count} routers", "closed": "ended"}
        return f"{type(self).__name__}({states[self._state]}, {self._holds()})"

    # What a kind of block decides

    def _holds(self) -> str:
        """What repr shows beside the state."""
        return f"{self._done()} micro-batches"

    def _check_model(self) -> None:
        """Refuse what doesn't fit, before any hook is registered."""

    def _attach_router(self, router: Router, chunk: int, marks: Marks) -> None:
        """Hang hooks on a router."""
        raise NotImplementedError

    def _finish(self) -> None:
        """The body ended without an exception."""

    # Its life

    def __enter__(self: _B) -> _B:
        if self._unentered is not None:
            self._unentered.detach()
        if self._state != "new":
            raise ReplayError(
                f"this {self.name} block was entered before", expected="a new one", got="a used one"
            )
        self._routers = find(self._chunks)
        if self.puts_together:
            found = self._all_routers()
            check_alike({f"layer {one.label}, {one.path}": (one.topk, one.num_experts) for one in found})
        self._count = len(self._all_routers())
        self._check_model()
        self._timeline = Timeline(len(self._chunks))
        # An interrupt may come on the last line of `__exit__`, too: then the block is undone when it dies.
        weakref.finalize(self, self._undo.close).atexit = False
        try:
            self._state = "open"
            self._attach()
            return self
        except BaseException:
            self._close()
            self._clear()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if self.failed is not None:
                    raise self.failed
                self._unchanged.check("at the end of the block")
                self._close()
                self._check_complete()
                self._finish()
        finally:
            self._close()
            self._clear()

    def defer(self, error: ReplayError) -> None:
        """Raise this when the block is left, if nothing else went wrong before."""
        if self.failed is None:
            self.failed = error
            # At once: what else goes wrong before the block is left would hide it.
            logger.error("[npu_replay] %s; the pass goes on, and stops at its end", error.line)

    def _attach(self) -> None:
        self._unchanged = Unchanged(self._chunks, self._routers)
        for chunk, module in enumerate(self._chunks):
            marks = Marks(functools.partial(self._timeline.number, chunk))
            self._marks.append(marks)
            # The chunk first: it may itself be the router, and its forward begins before its top-k.
            self._before(module, Hook(self, self._may_wait(type(self)._chunk_begins), module, chunk))
            ends = Hook(self, self._may_wait(type(self)._chunk_ends), module, chunk)
            if self.goes_first:
                self._after(module, ends)
            for router in self._routers[chunk]:
                self._attach_router(router, chunk, marks)
            if not self.goes_first:
                self._after(module, ends)
            for handle in routers.mark(module, self._routers[chunk], marks):
                self._undo.callback(handle.remove)

    def _before(self, module: nn.Module, hook: Hook) -> None:
        self._undo.callback(hook.take_off)
        self._hung(module, module.register_forward_pre_hook(hook, with_kwargs=True))

    def _after(self, module: nn.Module, hook: Hook) -> None:
        self._undo.callback(hook.take_off)
        self._hung(module, module.register_forward_hook(hook, prepend=self.goes_first, always_call=True))

    def _hung(self, module: nn.Module, handle: Any) -> None:
        self._unchanged.hold(type(module).__name__, handle.hooks_dict_ref(), handle.id)
        for hooks in ("_forward_pre_hooks", "_forward_hooks"):
            self._unchanged.hold(type(module).__name__, vars(module), hooks)

    def _may_wait(self, act: Callable[..., Any]) -> Callable[..., Any]:
        """What a hook does, or the same with its errors kept until the block is left."""
        if not self.errors_wait:
            return act
        block = weakref.ref(self)

        def waits(*args: Any) -> Any:
            try:
                return act(*args)
            except ReplayError as error:
                if (alive := block()) is not None:
                    alive.defer(error)
                return None

        return waits

    def _close(self) -> None:
        self._undo.close()
        if self._state == "open":
            self._state = "closed"

    def _clear(self) -> None:
        """The block is over: keep neither the model nor its routers."""
        for held in (self._chunks, self._routers, self._marks):
            held.clear()
        self._unchanged = Unchanged((), ())

    # What it knows

    def _done(self) -> int:
        """Micro-batches whose forward has ended."""
        return max(self._timeline.ended, default=0)

    def _all_routers(self) -> list[Router]:
        return [router for routers in self._routers for router in routers]

    # The chunks' hooks

    def _chunk_begins(self, chunk: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the hook returns: None, or other arguments for the call."""
        if in_backward():
            self._unchanged.check("in a recompute of the model")
        else:
            self._begin(chunk, args, kwargs)

    def _chunk_ends(self, chunk: int, args: tuple[Any, ...], output: object) -> None:
        if not in_backward():
            self._end(chunk, output)

    def _begin(self, chunk: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward:
        """A forward of a chunk, called with these, begins."""
        self._unchanged.check(micro_batch(self._timeline.ended[chunk]))
        self._marks[chunk].clear()
        return self._timeline.begin(chunk)

    def _end(self, chunk: int, output: object) -> tuple[Forward, bool] | None:
        """A forward of a chunk is over; return it, and whether it came to its end. None: it was refused."""
        ended = self._timeline.end(chunk, output)
        if ended is None and output is not None:
            raise MicroBatchError(
                "the model was called inside its own forward",
                where=f"chunk {chunk}, {micro_batch(self._timeline.ended[chunk] - 1)}",
                expected="one forward after the other",
                got="one that began and ended in another",
                cause="a forward hook of somebody's that calls the model, for a metric or a second view",
            )
        return ended

    def _check_complete(self) -> None:
        """The body is through: did every chunk see the same forwards?"""
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
