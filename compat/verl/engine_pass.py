"""Runs one pass of an engine: its action, its session, its routes, and how ranks leave together.

verl sets an action on all routers of the process, runs a schedule and clears the action. The action opens a
record or a replay of the model whose engine runs the schedule; it closes when the schedule ends, before an
optimizer steps. An error on one rank waits until all ranks can leave: before the schedule (`_begin`) or after
it (`_settle`). Outside an engine's pass verl's functions are verl's own (`install`).
"""

from __future__ import annotations

import inspect
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist

from npu_replay.compat.megatron.parallel_state import unwrapped
from npu_replay.compat.verl.batch_routes import keys_in_place
from npu_replay.compat.verl.engine_adapter import EngineAdapter, Problem, together
from npu_replay.compat.verl.files import ROUTES
from npu_replay.compat.verl.found_routes import Delivery, exchange, faults_of, found_in
from npu_replay.compat.verl.metrics import COUNTED, add_metrics, announce, figures, summary
from npu_replay.environment import BAD_SAMPLES, DELIVERY, METRICS_EVERY, read
from npu_replay.errors import MicroBatchError, ReplayError, described
from npu_replay.parallel.rank_failures import agreed, all_here, gathered
from npu_replay.parallel.row_gather import CEILING, above_ceiling
from npu_replay.sessions.record import StepRecording
from npu_replay.sessions.replay import StepReplay

logger = logging.getLogger(__name__)

RECORD = "record"
REPLAY = "replay_forward"
BACKWARD = "replay_backward"
"""The values of verl's RouterReplayAction, and of Megatron's."""

_MARK = "enable_routing_replay"
"""verl's mark in a batch: True in what an actor records or replays, False in what it doesn't."""


_Kind = TypeVar("_Kind", bound=StepReplay | StepRecording)


class EnginePass:
    """Runs one schedule of an engine; without an engine, keeps the action that verl sets for a pass inside.

    Args:
        trains: whether the schedule runs backward.
        flagged: whether verl's flag in the batch asks for a record or a replay.
        is_off: no action has an effect, as in a reference pass through the actor's own functions.

    Attributes:
        action: the current action; empty without one.
        session: the open record or replay.
        found: the routes of its batch.
        tolerant: whether samples with bad routes are counted instead of raised.
        metrics: plain numbers, once the ranks have left.
    """

    def __init__(
        self,
        engine: EngineAdapter | None = None,
        *,
        trains: bool = False,
        flagged: bool = False,
        is_off: bool = False,
    ) -> None:
        self.engine: Any = engine
        self.trains = trains
        self.flagged = flagged
        self.is_off = is_off
        self.action = ""
        self.session: StepReplay | StepRecording | None = None
        self.found = Delivery()
        self._problem: ReplayError | None = None  # raised when the other ranks know
        # An error in the first step is in every step.
        self.tolerant = engine is not None and engine.updates > 0
        self.metrics: dict[str, float] = {}
        self._counted: Counter[str] = Counter()

    @property
    def keeps(self) -> bool:
        """Return whether what is recorded stays on this rank."""
        return self.found.stays and self.action == RECORD

    def find(self, data: Any) -> None:
        """Find the routes of the batch, before its schedule."""
        with Problem("have its routes here") as problem:
            if self.engine.files is not None:
                self.engine.files.give(data)
            started = time.perf_counter()
            self.found = found_in(self.engine, data)
            microseconds = int((time.perf_counter() - started) * 1e6)
            self.count(microseconds=microseconds, bytes=self.engine.routes.nbytes)
        self._problem = problem.error

    def count(self, **counted: int) -> None:
        self._counted.update(counted)

    def set(self, action: str) -> None:
        """Begin a record or a replay; in no engine's pass, keep the action for one."""
        before = self.action
        self.action = "" if self.is_off else action
        if self.engine is None or (self.session is not None and before == action):
            return
        # verl sets replay first and then, in a record, record: a session that saw no forward is dropped.
        self._close(None if self.session is not None and self.session.done else ReplayError)
        self._open()

    def clear(self) -> None:
        self.action = ""

    def defer(self, error: ReplayError) -> None:
        """Raise an error when all ranks can leave: after the schedule, if a session is open."""
        if self.session is None:
            raise error
        self.session.defer(error)

    @contextmanager
    def deferring(self, what: str) -> Iterator[None]:
        """Defer an error of the block: the other ranks are in the collectives of their forwards."""
        with Problem(what) as problem:
            yield
        if problem.error is not None:
            self.defer(problem.error)

    def opened(self, kind: type[_Kind], model: Any = None, stage: int | None = None) -> tuple[_Kind, int]:
        """Return the open session, and the number of the chunk; raises MicroBatchError if none is open."""
        if not isinstance(self.session, kind):
            raise MicroBatchError(
                f"no {'record' if kind is StepRecording else 'replay'} is on for this model",
                expected="verl's action before the forward, in a pass of its engine",
                got=f"action {self.action or None}",
                cause="a forward step outside the engine's forward_backward_batch",
            )
        wanted = model[0] if isinstance(model, list | tuple) else model
        chunks = self.session.chunks
        for number, chunk in enumerate(chunks):
            if wanted is not None and any(module is wanted for module in unwrapped(chunk)):
                return self.session, number
        # verl reads the stage off the model, and takes 0 if the model has none: Megatron-core 0.12's
        # schedules set it in the parallel state instead; newer ones don't.
        if len(chunks) == 1:
            return self.session, 0
        if all(any(hasattr(module, "vp_stage") for module in unwrapped(chunk)) for chunk in chunks):
            return self.session, stage or 0
        from megatron.core import parallel_state

        return self.session, int(parallel_state.get_virtual_pipeline_model_parallel_rank() or 0)

    def _open(self) -> None:
        """Open a session whose errors wait for the end of the schedule."""
        record = self.action == RECORD
        chunks = list(self.engine.chunks)
        with Problem("record" if record else "replay") as problem:
            if record:
                self.session = StepRecording(chunks, errors_wait=True).__enter__()
            else:
                every = int(read(METRICS_EVERY, 10))  # only in each n-th update, since it costs a top-k
                judged = self.trains and every > 0 and _is_judged(self.engine.updates, every)
                self.session = StepReplay(chunks, errors_wait=True, live_mismatch=judged).__enter__()
        self._begin(problem.error, records=record)

    def _close(self, error: type[ReplayError] | None = None) -> None:
        """Close the open session, if any; with an error, also one that isn't complete."""
        session = self.session
        self.session = None
        if session is not None:
            session.__exit__(error, None, None)

    @contextmanager
    def entered(self) -> Iterator[EnginePass]:
        """Make this the current pass for the length of a block."""
        outer = current()
        if outer.is_off:  # nothing inside has an effect: a reference asks for log-probs as an actor does
            yield outer
            return
        self.action = "" if self.is_off else outer.action
        _passes.append(self)
        try:
            if self.engine is None:
                yield self
            else:
                with self._running():
                    yield self
        except BaseException:
            self.action = ""
            raise
        finally:
            _passes.remove(self)
            if not self.is_off and serves():
                outer.action = self.action

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Open the current action, and settle with all ranks at the end."""
        self.engine.routes.lent = self.found.carried
        try:
            try:
                if self.engine.acts and self.flagged:
                    self.set(REPLAY if self.engine.from_rollout or self.trains else RECORD)
                elif self.action:
                    self._open()
                yield
                if self.engine.acts:
                    self.clear()
            except ReplayError as error:
                if not error.shared:
                    logger.error("%s", error)  # no collective here: other ranks may never reach it
                    self._settle(self.session, error)
                raise
            session = self.session
            with Problem("end a pass") as problem:
                self._close()
            self._settle(session, problem.error)
        finally:
            self._close(ReplayError)
            self.engine.routes.lent = {}

    def _begin(self, error: ReplayError | None, *, records: bool) -> None:
        """Meet the other ranks before the schedule, which would wait for a missing rank.

        Raises:
            ReplayError: any rank can't record or replay, or ranks have different settings.
        """
        engine = self.engine
        if not engine.met:
            _meet(engine)
        totals = faults_of(self.found, records=records) | {"salt": secrets.randbits(40)}
        sums = agreed(error or self._problem, totals)
        if self.trains:
            engine.r2.trained()
        exchange(engine, self.found, sums, records=records)

    def _settle(self, session: StepReplay | StepRecording | None, error: ReplayError | None) -> None:
        """Agree with the other ranks, log once that replay is on, and keep the figures."""
        engine = self.engine
        if session is None and error is None:
            return
        if session is not None:
            self.count(**session.counts())
        if self.trains:
            self.count(microseconds=engine.microseconds)
            engine.microseconds = 0
        else:
            engine.microseconds += self._counted["microseconds"]
        sums = agreed(error, {name: self._counted[name] for name in COUNTED} | {"ranks": 1})
        bad = sums["bad_samples"]
        samples = sums["samples"]
        problem = above_ceiling(bad, samples, engine.ceiling, setting=BAD_SAMPLES, where="all ranks")
        if problem is not None:
            _raise_on_every_rank(problem)
        if isinstance(session, StepReplay):
            self.metrics = figures(sums)
            if not engine.announced:
                engine.announced = True
                if not dist.is_initialized() or dist.get_rank() == 0:
                    announce(summary(engine.mode, sums, engine.stack))
        if self.trains:
            engine.updates += 1


def _is_judged(update: int, every: int) -> bool:
    """Return whether an update counts the live choice: the first, then one drawn of each `every`.

    Always the same place in a step would hide the drift within it. In R2 the first update of a step shows 0,
    since it has the weights of the record. All ranks draw the same.

    >>> [update for update in range(50) if _is_judged(update, 10)]
    [0, 12, 20, 33, 43]
    """
    block, place = divmod(update, every)
    return place == (random.Random(block).randrange(every) if block else 0)


_passes = [EnginePass()]
"""The last is the current pass; the first is outside of any engine's pass, and has no action."""


def current() -> EnginePass:
    """Return the current pass; outside of an engine's pass, one without an engine."""
    return _passes[-1]


def serves() -> bool:
    """Return whether npu_replay answers verl's functions: in a pass, and in a worker that will run one."""
    return len(_passes) > 1


def run(kind: type[EngineAdapter], original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an engine's `forward_backward_batch` as a pass; `kind` adapts the engine."""
    if (engine := kind.of(self)) is None:
        # verl asks for the action here too; its own function fails on Megatron-core 0.12.1 (T40).
        with EnginePass(is_off=True).entered():
            return original(self, *args, **kwargs)
    bound = inspect.signature(original).bind(self, *args, **kwargs).arguments
    data = bound["data"]
    mark = None
    if engine.has_flag:
        from verl.utils import tensordict_utils

        if current().is_off:  # an engine reads its batch; a legacy actor asks for the action
            tensordict_utils.assign_non_tensor(data, **{_MARK: False})
        mark = tensordict_utils.get_non_tensor_data(data, _MARK, None)
    if current().is_off:
        return original(self, *args, **kwargs)
    flagged = bool(mark)
    trains = not bound.get("forward_only", False)
    if trains and mark is None and not current().action and not engine.is_critic:
        raise _unmarked(engine)
    running = EnginePass(engine, trains=trains, flagged=flagged)
    if flagged:
        running.find(data)
    with running.entered():
        with keys_in_place(data, ROUTES, running.found.keys):
            output = original(self, *args, **kwargs)
        files = engine.files if flagged else None
        if files is not None and self.is_mp_src_rank_with_outputs():
            files.keep(data, output, engine.model, from_rollout=engine.from_rollout)
    if trains:
        add_metrics(output, running.metrics)
    return output


@contextmanager
def without_adapter(original: Callable[[Any], Any], engine: Any) -> Iterator[Any]:
    """Set no action while a LoRA actor stands in for its reference."""
    with EnginePass(is_off=True).entered(), original(engine) as made:
        yield made


def waiting(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Keep an action of 0.7's workers for the pass that runs inside, which says whose chunks it means."""
    with EnginePass().entered():
        return original(*args, **kwargs)


def reference(original: Any, self: Any, data: Any) -> Any:
    """Set no action in a LoRA actor's reference pass, which goes through 0.7's compute_log_prob."""
    with EnginePass(is_off=True).entered():
        output = original(self, data)
    batch = getattr(output, "batch", None)
    if batch is not None and ROUTES in batch.keys():  # noqa: SIM118  a TensorDict iterates over rows
        del batch[ROUTES]
    return output


def _unmarked(engine: EngineAdapter) -> ReplayError:
    """Return the error for an update whose batch nobody has marked: verl would run it without a replay."""
    return ReplayError(
        f"router_replay.mode={engine.mode}, and this update would not replay: its batch isn't marked",
        where=described(type(engine.engine)),
        expected=f"{_MARK} in it, as verl's ActorRolloutRefWorker sets it for old log-probs and the update",
        got="none",
        cause="a worker of another package, or one that trains without ActorRolloutRefWorker. Have it call "
        f'tensordict_utils.assign_non_tensor_data(batch, "{_MARK}", True) before old log-probs and before '
        "the update, and with False for an update that is not to be replayed. Or set router_replay.mode to "
        "disabled",
    )


def _meet(engine: EngineAdapter) -> None:
    """Wait for all ranks before an engine's first pass, and compare the variables that all act by."""
    all_here()
    with together("read its environment"):
        engine.ceiling = read(BAD_SAMPLES, CEILING)
        delivery = read(DELIVERY) or "unset"
    everywhere = {*gathered(f"{BAD_SAMPLES}={engine.ceiling}, {DELIVERY}={delivery}")}
    if len(everywhere) > 1:
        _raise_on_every_rank(
            ReplayError(
                "a variable differs between the ranks",
                where="all ranks",
                expected="one value on all ranks: they leave together, or go on together",
                got="; ".join(sorted(everywhere)),
                cause="it was set on some nodes only; set it in the runtime_env of the job",
            )
        )
    engine.met = True


def _raise_on_every_rank(problem: ReplayError) -> None:
    """Raise an error that all ranks have found; the first rank has the whole message."""
    agreed(problem if not dist.is_initialized() or dist.get_rank() == 0 else None, {})
