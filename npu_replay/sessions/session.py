"""Define Session, the context manager behind every block: it changes a model and undoes that.

Read it from the top: entering, the hooks of a model chunk, leaving. What is done with the routers is its
`Work`: `Answering` answers their top-k, `Reading` reads their outputs.
"""

from __future__ import annotations

import logging
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from torch import nn

from npu_replay import routers
from npu_replay.errors import (
    MicroBatchError,
    ReplayError,
    RouterError,
)
from npu_replay.routers import Model, Router, check_alike, chunks_of, find, labels_of
from npu_replay.routes.arguments import StageLabels
from npu_replay.seam.backward import in_backward
from npu_replay.seam.torch_state import Hook
from npu_replay.sessions.first_error import FirstError
from npu_replay.sessions.micro_batch import MicroBatch, place_of
from npu_replay.sessions.timeline import Marks, Timeline

logger = logging.getLogger(__name__)

_S = TypeVar("_S", bound="Session")

_answered: WeakValueDictionary[int, Session] = WeakValueDictionary()
"""Maps the id of a router to the open session that answers it; a router has at most one."""


class Session:
    """Hangs hooks on the chunks of a model; its `Work` handles the routers. Use it as a context once.

    Args:
        model: a module, or the list of its virtual-pipeline chunks. One micro-batch is one `__call__`
            of the module (of every chunk).
        work: what is done with the routers.
        errors_wait: keep the first error until the block is left, and go on with the routers' own choices. A
            rank that raises in the middle of a schedule would leave the others in a collective until its
            timeout; the kept error is raised when the schedule is over, before an optimizer steps.
    """

    name = "session"
    _finalizer: weakref.finalize[..., Any] | None = None
    _results = ""  # how much was found, for repr

    def __init__(self, model: Model, work: Work, *, errors_wait: bool = False) -> None:
        self.chunks = chunks_of(model)
        self.errors = FirstError(wait=errors_wait)
        self.timeline = Timeline(len(self.chunks))
        self.routers: list[list[Router]] = []  # by chunk, while the block is open
        self.marks: list[Marks] = []
        self.undo = ExitStack()
        self._work = work
        self._count = 0
        self._state = "new"

    def __enter__(self: _S) -> _S:
        if self._finalizer is not None:
            self._finalizer.detach()
        ReplayError.unless(
            self._state == "new", f"this {self.name} block was entered before", "a new one", "a used one"
        )
        self.routers = find(self.chunks)
        all_routers = self.all_routers
        if self._work.puts_together:
            sizes = {f"layer {r.label}, {r.path}": (r.topk, r.num_experts) for r in all_routers}
            check_alike(sizes)
        self._count = len(all_routers)
        for router in all_routers if self._work.answers_topk else ():
            if (other := _answered.get(id(router.module))) is not None:
                raise RouterError(
                    f"{self.name} can't be opened inside {other.name} on the same router",
                    where=f"layer {router.label}",
                    expected="one open block for a router",
                    got=f"an open {other.name} block",
                    cause=(
                        "a log-prob pass that the update calls, or an earlier block that was never left; "
                        "it ends when nothing refers to its session any more (session = None)"
                    ),
                )
        # Where `__exit__` never runs, garbage collection undoes the block.
        self._finalizer = weakref.finalize(self, _dropped, self.undo, self.name)
        self._finalizer.atexit = False
        try:
            self._state = "open"
            self.timeline = Timeline(len(self.chunks))
            self._work.enters(self)
            for chunk, module in enumerate(self.chunks):
                self._attach(chunk, module)
            return self
        except BaseException:
            self._end()
            raise

    def _attach(self, chunk: int, module: nn.Module) -> None:
        marks = Marks(self.timeline, chunk)
        self.marks.append(marks)
        # The chunk's hook first: a chunk may itself be the router, and begins before its top-k.
        self.before(module, Hook(self, type(self)._chunk_begins, module, chunk))
        for router in self.routers[chunk]:
            if self._work.answers_topk:
                self.undo.callback(_answered.pop, id(router.module), None)
                _answered[id(router.module)] = self
            self._work.attach(self, router, chunk)
        self.after(module, Hook(self, type(self)._chunk_ends, module, chunk))
        for handle in routers.mark(module, self.routers[chunk], marks):
            self.undo.callback(handle.remove)

    def before(self, module: nn.Module, hook: Hook) -> None:
        handle = module.register_forward_pre_hook(hook, with_kwargs=True)
        self.undo.callback(handle.remove)

    def after(self, module: nn.Module, hook: Hook) -> None:
        # Before others' hooks, whose top-ks aren't the router's; or behind them, to read what they leave.
        first = self._work.answers_topk
        handle = module.register_forward_hook(hook, prepend=first, always_call=True)
        self.undo.callback(handle.remove)

    def _chunk_begins(self, chunk: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.errors:
            if in_backward():
                return
            self.marks[chunk].clear()
            self._work.begins(self.timeline.begin(chunk), args, kwargs)

    def _chunk_ends(self, chunk: int, args: tuple[Any, ...], output: object) -> None:
        if not in_backward():
            with self.errors:
                self._end_forward(chunk, output)

    def _end_forward(self, chunk: int, output: object) -> None:
        ended = self.timeline.end(chunk, output)
        if ended is None and output is not None:
            raise MicroBatchError(
                "the model was called inside its own forward",
                where=place_of(self.timeline.ended[chunk] - 1, chunk, len(self.chunks)),
                cause="a forward hook of your own that calls the model, for a metric or a second view",
            )
        if ended is not None:
            self._work.ends(ended)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                if self.errors.first is not None:
                    raise self.errors.first
                self.undo.close()
                self._check_complete()
                self._work.check_complete()
                self._finish()
        finally:
            self._end()

    def _check_complete(self) -> None:
        ended = self.timeline.ended
        MicroBatchError.unless(
            max(ended) > 0,
            f"nothing ran inside this {self.name} block",
            expected="at least one __call__ of the module that was passed",
            got=0,
            cause="the training loop calls another module (an outer wrapper, or a copy)",
        )
        MicroBatchError.unless(
            min(ended) == max(ended),
            "the chunks ran different numbers of forwards",
            expected="each chunk once a micro-batch",
            got=ended,
            cause="a schedule that was cut short, or a chunk that is missing from the list",
        )

    def _finish(self) -> None:
        """Build the results. Called after a body that raised nothing, with nothing outstanding."""

    def _end(self) -> None:
        self.undo.close()
        if self._finalizer is not None:
            self._finalizer.detach()
        self._state = "closed"
        self.timeline.let_go()
        for container in (self.chunks, self.routers, self.marks):
            container.clear()
        self._work.clear()

    def defer(self, error: ReplayError) -> None:
        """Keep this error and raise it when the block is left, unless an earlier one is kept."""
        self.errors.keep(error)

    @property
    def done(self) -> int:
        return max(self.timeline.ended, default=0)

    @property
    def all_routers(self) -> list[Router]:
        return [router for routers in self.routers for router in routers]

    def labels(self, chunk: int) -> StageLabels:
        return labels_of(self.routers[chunk], self.all_routers)

    def metrics(self) -> dict[str, float]:
        """Return plain numbers for any tracker: micro-batches, routers, seconds spent in npu_replay.

        `seconds` leaves out the routers' calls in micro-batches that aren't checked.
        `capacity_dropped` is added where tokens over an expert's capacity are dropped: the share of chosen
        experts that lost their token, in the micro-batches whose outputs are checked (0, 1, 2, 4, 8, ...).
        `live_mismatch` and `overlap` are added where the routes were compared with the routers' own choice.
        """
        counted = self.counts()
        seconds = counted.get("microseconds", 0) / 1e6
        figures = {"micro_batches": self.done, "routers": self._count, "seconds": seconds}
        for name, part, of in (
            ("capacity_dropped", "dropped", "chosen"),
            ("live_mismatch", "differing", "compared"),
            ("overlap", "shared", "given"),
        ):
            if counted.get(of):
                figures[name] = counted[part] / counted[of]
        return figures

    def counts(self) -> dict[str, int]:
        """Return the whole numbers behind `metrics`, which ranks can add up. Waits for the device."""
        ReplayError.unless(
            self._state != "new", f"the {self.name} block was never entered", "with ... as session:", self
        )
        return {"routers": self._count} | self._work.counts()

    def __repr__(self) -> str:
        states = {"new": "not entered", "open": f"open on {self._count} routers", "closed": "ended"}
        return f"{type(self).__name__}({states[self._state]}, {self._progress()}{self._results})"

    def _progress(self) -> str:
        return f"{self.done} micro-batches"


class Work:
    """Defines what a session does with its routers; this base class does nothing."""

    answers_topk = False  # if so, no other session may answer these routers, and it goes before other hooks
    puts_together = True  # all routers go into one RoutedExperts for each micro-batch, so they must be alike

    def enters(self, session: Session) -> None:
        """Check the model, then make the changes to be undone at exit. Runs before any hook is attached."""

    def attach(self, session: Session, router: Router, chunk: int) -> None:
        """Attach what the work needs to a router."""

    def begins(self, begun: MicroBatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a forward of a chunk with the arguments of its call, or refuse it.

        The previous one has ended, or an interrupt has stopped it.
        """

    def ends(self, ended: MicroBatch) -> None:
        """End a forward."""

    def check_complete(self) -> None:
        """Raise an error if something is still outstanding at the end of the block."""

    def clear(self) -> None:
        """Drop references to the model and all state of the open block."""

    def counts(self) -> dict[str, int]:
        """Return whole numbers that ranks can add up. Waits for the device."""
        return {}


def to_enter(session: _S) -> _S:
    """Return the session, and log a WARNING if it dies or the process ends before it is entered."""
    text = "[npu_replay] %s() was called, but its block was never entered: with npu_replay.%s(...):"
    session._finalizer = weakref.finalize(session, logger.warning, text, session.name, session.name)
    return session


def _dropped(undo: ExitStack, name: str) -> None:
    """End a block that died without being left. It gets no session, or that would never die."""
    undo.close()
    logger.warning(
        "[npu_replay] an open %s() was dropped, and ended: keep a reference to it until it is left", name
    )


@dataclass(frozen=True)
class OpenSession:
    """Describes an open block that answers routers, and the decoder layers of its routers."""

    name: str
    layers: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} on layers {', '.join(map(str, self.layers))}"


def open_sessions() -> tuple[OpenSession, ...]:
    """Return the blocks that answer routers in this process."""
    answering = {id(session): session for session in list(_answered.values())}.values()
    return tuple(
        OpenSession(block.name, tuple(sorted(r.label for r in block.all_routers))) for block in answering
    )
