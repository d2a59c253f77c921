"""One pass of a verl engine: its model is known, its ranks leave together, and its figures are told.

`forward_backward_batch` of an engine (0.7.1 on) or of a worker's actor (0.7) runs one schedule. It is
wrapped: what verl's actions open meanwhile is on that engine's chunks, and closed before an optimizer steps.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import nn

from npu_replay.compat.patching.patches import when_undone
from npu_replay.compat.verl import carried, delivery
from npu_replay.compat.verl.actions import problem_of, switch
from npu_replay.compat.verl.files import ROUTES, TOKENS, Files
from npu_replay.compat.verl.metrics import COUNTED, add_metrics, announce, compares, figures, summary
from npu_replay.compat.verl.recorded import Keeper, recorded
from npu_replay.compat.verl.settings import setting
from npu_replay.environment import BAD_SAMPLES, DELIVERY, read
from npu_replay.errors import InvalidRoutes, ReplayError
from npu_replay.parallel.bad_samples import CEILING, above_ceiling
from npu_replay.parallel.rank_failures import agreed, all_here
from npu_replay.routers import find, labels_of
from npu_replay.sessions.stepwise import StepRecording, StepReplay

logger = logging.getLogger(__name__)


@dataclass
class _Engine:
    """What is kept of an engine between its passes."""

    entry: str = "forward_backward_batch"
    files: Files | None = None
    kind: str = ""
    updates: int = 0
    announced: bool = False
    met: bool = False
    """Have its ranks met before a first pass?"""
    microseconds: int = 0
    """Spent in passes without a backward, whose figures verl has no place for, since the last one with."""


_engines: WeakKeyDictionary[Any, _Engine] = WeakKeyDictionary()


@dataclass(frozen=True)
class Asked:
    """What is asked of an engine or actor, each of itself.

    Attributes:
        chunks: those of its model.
        settings: of router_replay: mode ("R2", "R3" or "disabled"), record_file, replay_file.
        model: its TransformerConfig or RoutedModel, for routes in files.
        stack: what it runs on, for the line that says that replay is on; Megatron and what is beside it when
            not given.
        kind: whose engine it is; what is installed again by itself.
        entry: its method that refuses to run when npu_replay was uninstalled.
    """

    chunks: Callable[[Any], Any]
    settings: Callable[[Any], Any]
    model: Callable[[Any], Any]
    stack: Callable[[Any], str] = lambda engine: ""
    kind: str = "Megatron"
    entry: str = "forward_backward_batch"


def pass_of(engine: Any, asked: Asked, *, trains: bool, flagged: bool) -> Pass:
    """A pass of an engine, of which is kept what has to be from one to the next."""
    settings = asked.settings(engine)
    if (kept := _engines.get(engine)) is None:
        kept = _engines[engine] = _Engine(asked.entry, Files.of(settings), asked.kind)
    return Pass(list(asked.chunks(engine)), settings.mode, kept, trains, flagged, asked.stack(engine))


def wrapped(original: Callable[..., Any], asked: Asked) -> Any:
    """`forward_backward_batch`, as a pass of a job."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward_backward_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = asked.settings(self)
        if settings.mode == "disabled":
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        data = given["data"]
        flags = _flags_of(data)
        if switch.is_off:  # an engine reads it in its batch; a worker's actor asks the switch
            if flags is not None:
                flags.assign_non_tensor(data, enable_routing_replay=False)
            return original(self, *args, **kwargs)
        flagged = bool(flags and flags.get_non_tensor_data(data, "enable_routing_replay", False))
        job = pass_of(self, asked, trains=not given.get("forward_only", False), flagged=flagged)
        files = job.engine.files if flagged else None
        if files is not None:
            job.unread = problem_of("read or write files of routes", files.give, data)
        if flagged and job.r3:
            take_in = lambda: job.receive(data, asked.model(self))  # noqa: E731  what it asks for may fail too
            job.unread = job.unread or problem_of("take routes in", take_in)
        elif flagged:
            job.unread = job.unread or problem_of("keep routes here", job.stays, self, data)
        with switch.running(job):
            with carried.in_place_of(data, ROUTES, job.keys, job.carried):
                output = original(self, *args, **kwargs)
            if files is not None and self.is_mp_src_rank_with_outputs():
                unwritten = problem_of(
                    "write files of routes", files.keep, data, output, asked.model(self), settings.mode
                )
                if unwritten is not None:
                    raise unwritten
        if job.trains:
            add_metrics(output, job.metrics)
        return output

    return forward_backward_batch


def _flags_of(data: Any) -> Any:
    """verl's functions for what isn't a tensor in a batch; None for a batch that has no such."""
    flags: Any = sys.modules.get("verl.utils.tensordict_utils")
    batches: Any = sys.modules.get("tensordict")  # an actor's DataProto is none
    known = flags is not None and batches is not None and isinstance(data, batches.TensorDictBase)
    return flags if known else None


def refuse_engines() -> None:
    """npu_replay is being uninstalled: engines that were built with it can't replay by verl's own means.

    Their routers lack what verl's patch hangs on them, and they would go on without a replay, unnoticed.
    """
    for engine, kept in list(_engines.items()):
        setattr(engine, kept.entry, _refuse)
    recorded.clear()
    delivery.arrived.has(())


when_undone(refuse_engines)


def restore_engines(kind: str = "Megatron") -> None:
    """npu_replay is installed again: engines that were refused can go on, built with it as they are."""
    for engine, kept in list(_engines.items()):
        if kept.kind == kind and vars(engine).get(kept.entry) is _refuse:
            delattr(engine, kept.entry)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise ReplayError(
        "npu_replay was uninstalled after this engine had replayed with it",
        expected="uninstall() before the engine is built, or NPU_REPLAY_DISABLE=1 from the start",
        got="uninstall() in the middle of a job",
        cause="start the workers anew to go on without npu_replay, or npu_replay.install() to go on with it",
    )


@dataclass
class Pass:
    """One schedule of an engine.

    Attributes:
        chunks: of the model.
        mode: "R2" or "R3".
        engine: what is kept of it.
        trains: does it run backward?
        flagged: does verl's flag in the batch ask for a record or a replay?
        stack: what it runs on, in words; empty for Megatron.
        metrics: plain numbers, when it is settled.
        unread: why this rank has no routes from files, if it should have some.
    """

    chunks: list[nn.Module]
    mode: str
    engine: _Engine
    trains: bool
    flagged: bool = False
    stack: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    unread: ReplayError | None = None
    keeper: Keeper | None = None
    """Keeps what this pass records in this rank; batches carry keys then."""
    keys: list[int | None] = field(default_factory=list)
    """Those of the batch's samples, which it has in the place of routes while it runs."""
    carried: carried.Found = field(default_factory=dict)
    """What the batch brought of this rank's layers."""
    _stages: Any = None
    _lost: dict[int, delivery.Routes] = field(default_factory=dict)
    """By key, why samples of references have none on this rank, then on any."""
    _answered: set[int] = field(default_factory=set)
    """The keys of those that verl hasn't rejected."""
    _stays: bool = False
    """Do R2's routes stay in the ranks that record them? Then:"""
    _replica: int = 0
    _replicas: Any = None
    _wanted: list[int] = field(default_factory=list)
    """The keys in the batch."""
    _counted: Counter[str] = field(default_factory=Counter)
    _ceiling: int = 0
    """The share of bad samples that is let through, in millionths; the same on all ranks once begun."""

    @property
    def r3(self) -> bool:
        """Do the routes come from a rollout engine?"""
        return self.mode == "R3"

    @property
    def tolerant(self) -> bool:
        """Are samples with bad routes counted? Not in the first step: what is wrong there is wrong in all."""
        return self.engine.updates > 0

    def compares(self) -> bool:
        """Is the live router's choice counted in this pass?"""
        return self.trains and compares(self.engine.updates)

    def min_overlap(self) -> float | None:
        """Return what `replay` is told: None, for its default, up to the first update; 0 after it."""
        return 0 if self.engine.updates else None

    def count(self, **figures: int) -> None:
        """Add to the figures of this pass."""
        self._counted.update(figures)

    def receive(self, data: Any, config: Any) -> None:
        """Have the routes of this rank's layers here: fetched, or out of the engine's batch.

        Args:
            data: the batch.
            config: the model's TransformerConfig or RoutedModel.

        Raises:
            ReplayError: none can be had at all.
        """
        started = time.perf_counter()
        layers = self._layers()
        references, routes = delivery.references_in(data), data.get(ROUTES, None)
        if references is not None:
            self._no_files()
            self._fetch(references, data, layers)
        elif routes is not None and routes.is_nested and not delivery.are_keys(routes):
            delivery.arrived.has(layers)
            self.carried = carried.checked(routes, config, layers, data.get(TOKENS, None))
            self.keys = list(self.carried)
            self._stages = carried.stages_of(config)
        spent = int((time.perf_counter() - started) * 1e6)
        self.count(microseconds=spent, bytes=delivery.arrived.nbytes)

    def _fetch(self, references: list[Any], data: Any, layers: Sequence[int]) -> None:
        keys, tokens = delivery.keys_of(data.get(ROUTES, None), references), data[TOKENS].unbind()
        of_key = {key: ids for key, ids in zip(keys, tokens, strict=False) if key}
        self.keys = keys
        self._lost.update(delivery.arrived.receive(references, layers, of_key))
        masks = data.get("response_mask", None)
        answered = [True] * len(keys) if masks is None else [bool(one.any()) for one in masks.unbind()]
        self._answered = {key for key, one in zip(keys, answered, strict=False) if key and one}

    def _layers(self) -> Sequence[int]:
        """The decoder layers that this rank's routers are in."""
        routers = itertools.chain.from_iterable(find(self.chunks))
        return labels_of(sorted(routers, key=lambda router: router.label))

    def _no_files(self) -> None:
        ReplayError.unless(
            self.engine.files is None or self.engine.files.record is None,
            "routes that aren't in batches can't be written to files",
            f"no {DELIVERY}, or no router_replay.record_file",
            "both",
            "a rank has its own layers alone",
        )

    def stays(self, engine: Any, data: Any) -> None:
        """R2's routes stay in the ranks that record them, where NPU_REPLAY_DELIVERY says so.

        Args:
            engine: verl's, and `data`, its batch.

        Raises:
            ReplayError: files are asked for too, or the variable has a value that nobody knows.
        """
        if not read(DELIVERY):
            return
        if setting(engine.engine_config, "dynamic_context_parallel"):
            if not self.engine.met:
                logger.warning("[npu_replay] under dynamic_context_parallel %s has no effect in R2", DELIVERY)
            return
        self._no_files()
        layers = self._layers()
        delivery.arrived.has(layers)
        self._replica, self._replicas = engine.get_data_parallel_rank(), engine.get_data_parallel_group()
        self._wanted = [one for one in delivery.keys_in(data.get(ROUTES, None)) if one] if layers else []
        self._stays = True
        self.count(bytes=recorded.nbytes)

    def begin(self, error: ReplayError | None, *, records: bool) -> None:
        """Before the schedule, in which a rank that isn't there would be waited for.

        Args:
            error: why this rank can't.
            records: is it a record, or a replay?

        Raises:
            ReplayError: any rank can't record or replay, or they were told different things.
        """
        if not self.engine.met:
            all_here()
            self.engine.met = True
        error = error or self.unread
        try:
            self._ceiling = round(read(BAD_SAMPLES, CEILING) * 1e6)
        except ReplayError as unknown:
            error = error or unknown
        lacking = [] if records else recorded.lacking(self._wanted)
        bad = sum(isinstance(one, InvalidRoutes) for one in self.carried.values())
        told = {"ranks": 1, "ceilings": self._ceiling, "squares": self._ceiling**2, "bad": bad}
        told["lost"] = len(self._lost)
        told |= {"stay": self._stays, "lacking": len(lacking), "salt": secrets.randbits(40)}
        sums = agreed(error, told)
        if (unlike := self._unlike(sums)) is not None:
            _raise_on_every_rank(unlike)
        if self._stays and records:
            self.keeper = Keeper(sums["salt"], self._replica)
        if self.trains:
            recorded.trained()
        if sums["lacking"]:
            agreed(problem_of("exchange routes", recorded.fetch, lacking, self._replicas), {})
        if sums["bad"] and self._stages is not None:
            agreed(problem_of("tell which samples are bad", carried.tell, self.carried, self._stages), {})
        if sums["lost"]:
            agreed(problem_of("tell which samples are lost", self._tell_lost), {})
            due: list[Any] = [one for key, one in self._lost.items() if key in self._answered]
            agreed(due[0] if due and not self.tolerant else None, {})

    def _tell_lost(self) -> None:
        """What one rank can't read no rank replays: those of a replica may be on several nodes."""
        if dist.is_initialized():
            carried.tell(self._lost, dist.group.WORLD, "rank")
        delivery.arrived.refuse(self._lost)

    def _unlike(self, sums: dict[str, int]) -> ReplayError | None:
        """A setting that isn't the same on all ranks: each reads its own environment, and by these sums all
        see alike whether they have read the same."""
        ranks, cause = sums["ranks"], "it was set on some nodes only; set it in the runtime_env of the job"
        mine, mean = self._ceiling / 1e6, sums["ceilings"] / ranks / 1e6
        if ranks * sums["squares"] != sums["ceilings"] ** 2:  # by Cauchy-Schwarz: not all are equal
            return ReplayError(
                f"{BAD_SAMPLES} differs between the ranks",
                where="all ranks",
                expected="one number on all ranks: they leave together, or go on together",
                got=f"{mine:g} on this one, {mean:g} in the mean of all",
                cause=cause,
            )
        if sums["stay"] not in (0, ranks):
            return ReplayError(
                f"{DELIVERY} is set on some ranks alone",
                where="all ranks",
                expected="on all ranks or on none: what one keeps another one looks for",
                got=f"on {sums['stay']} of {ranks}",
                cause=cause,
            )
        return None

    def settle(self, session: StepReplay | StepRecording | None, error: ReplayError | None) -> None:
        """Agree with the other ranks, say once that it is on, and keep the figures.

        Raises:
            ReplayError: an error of any rank, or too many samples with bad routes.
        """
        if session is None and error is None:
            return
        if session is not None:
            self.count(**session.counts())
        if self.trains:
            self.count(microseconds=self.engine.microseconds)
            self.engine.microseconds = 0
        else:
            self.engine.microseconds += self._counted["microseconds"]
        sums = agreed(error, {name: self._counted[name] for name in COUNTED} | {"ranks": 1})
        bad, samples = sums["bad_samples"], sums["samples"]
        problem = above_ceiling(bad, samples, self._ceiling / 1e6, setting=BAD_SAMPLES, where="all ranks")
        if problem is not None:
            _raise_on_every_rank(problem)
        if isinstance(session, StepReplay):
            self.metrics = figures(sums)
            if not self.engine.announced:
                self.engine.announced = True
                if not dist.is_initialized() or dist.get_rank() == 0:
                    announce(summary(self.mode, sums, self.stack))
        if self.trains:
            self.engine.updates += 1


def _raise_on_every_rank(problem: ReplayError) -> None:
    """What all ranks have found alike; the first has the whole message."""
    agreed(problem if not dist.is_initialized() or dist.get_rank() == 0 else None, {})
