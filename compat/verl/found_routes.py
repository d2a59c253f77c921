"""Finds the routes of a batch before its pass, and lets the ranks tell each other about them.

They are fetched by reference or come in the batch (R3), or were recorded here (R2), and are of this rank's
layers; the batch has keys in their place meanwhile. A sample that is bad in one pipeline stage's layers, or
can't be read on one rank, takes the routers' own choice on all.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from npu_replay.compat.engines import setting
from npu_replay.compat.verl.batch_routes import Routes, are_keys, by_reference, keys_in, references_in
from npu_replay.compat.verl.engine_adapter import EngineAdapter, problem_of
from npu_replay.compat.verl.files import ROUTES, TOKENS
from npu_replay.compat.verl.tensors import MicroBatch
from npu_replay.environment import DELIVERY
from npu_replay.errors import InvalidRoutes, ReplayError, as_text
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.parallel.rank_failures import PATIENCE, Outcome, RankGroup, agreed
from npu_replay.routers import find, labels_of

logger = logging.getLogger(__name__)

_WORDS = 16
"""The number of errors whose full text other ranks are told: enough where a whole node is lost."""


class FoundRoutes:
    """Holds what one pass knows of its batch's routes before its schedule.

    Attributes:
        problem: why there are none, if there should be some; raised when the other ranks know.
        keys: of the batch's samples, in the place of routes during the pass.
        carried: by key, what the batch brought of this rank's layers.
        stays: whether R2 keeps its routes on the ranks that record them.
        counted: microseconds and bytes.
    """

    def __init__(self, engine: EngineAdapter | None) -> None:
        self._engine: Any = engine
        self.problem: ReplayError | None = None
        self.keys: list[int | None] = []
        self.carried: dict[int, Routes] = {}
        self.stays = False
        self.counted: Counter[str] = Counter()
        self._stages: Any = None  # the ranks of this one's pipeline, which hold other layers of `carried`
        # R3 by reference: why samples have no routes on this rank, then on any, by key; the keys of those
        # that verl hasn't rejected.
        self._lost: dict[int, Routes] = {}
        self._due: set[int] = set()
        # R2 by key: data-parallel rank and group; the batch's keys, and those whose routes are elsewhere.
        self._replica: tuple[int, Any] = 0, None
        self._wanted: list[int] = []
        self._lacking: list[int] = []

    def find(self, data: Any) -> None:
        """Get the routes of a batch, as far as this rank can before the schedule."""
        if (files := self._engine.files) is not None:
            self.problem = problem_of("read or write files of routes", files.give, data)
        take_in = self._receive if self._engine.mode == "R3" else self._stay
        self.problem = self.problem or problem_of("have its routes here", take_in, data)

    def _receive(self, data: Any) -> None:
        """Fetch the routes of R3, or check those in the batch."""
        started = time.perf_counter()
        engine, held, layers = self._engine, self._engine.routes, self._layers()
        references, routes = references_in(data), data.get(ROUTES, None)
        if references is not None:
            self._refuse_files()
            held.has(layers)
            self.keys = keys_in(routes, references)
            tokens = zip(self.keys, data[TOKENS].unbind(), strict=False)
            self._lost.update(engine.r3.receive(references, {key: ids for key, ids in tokens if key}))
            masks = data.get("response_mask", None)
            answered = [True] * len(self.keys) if masks is None else [one.any() for one in masks.unbind()]
            self._due = {key for key, one in zip(self.keys, answered, strict=False) if key and one}
        elif routes is not None and routes.is_nested and not are_keys(routes, fetched=bool(held.layers)):
            held.has(layers)
            model = engine.model
            self.carried = MicroBatch(routes, None, model).checked(layers, data.get(TOKENS, None))
            self.keys = list(self.carried)
            if int(getattr(model, "pipeline_model_parallel_size", 1)) > 1:
                self._stages = ParallelLayout.from_megatron(model).groups[1]
        spent = int((time.perf_counter() - started) * 1e6)
        self.counted.update(microseconds=spent, bytes=held.nbytes)

    def _stay(self, data: Any) -> None:
        """Look up which routes of R2 are on this rank, unless batches carry ids."""
        if not by_reference():
            return
        engine = self._engine.engine
        if setting(engine.engine_config, "dynamic_context_parallel"):
            if not self._engine.met:
                logger.warning("[npu_replay] under dynamic_context_parallel %s has no effect in R2", DELIVERY)
            return
        self._refuse_files()
        held, layers = self._engine.routes, self._layers()
        held.has(layers)
        self._replica = engine.get_data_parallel_rank(), engine.get_data_parallel_group()
        self._wanted = [one for one in keys_in(data.get(ROUTES, None)) if one] if layers else []
        self.stays = True
        self.counted.update(bytes=held.nbytes)

    def _layers(self) -> Sequence[int]:
        routers = itertools.chain.from_iterable(find(list(self._engine.chunks)))
        return labels_of(sorted(routers, key=lambda router: router.label))

    def _refuse_files(self) -> None:
        files = self._engine.files
        ReplayError.unless(
            files is None or files.record is None,
            "routes that aren't in batches can't be written to files",
            f"no {DELIVERY}, or no router_replay.record_file",
            "both",
            "a rank has its own layers alone",
        )

    def told(self, *, records: bool) -> dict[str, int]:
        """Return what the other ranks have to know, as numbers to be summed."""
        self._lacking = [] if records else self._engine.routes.lacking(self._wanted)
        bad = sum(isinstance(one, InvalidRoutes) for one in self.carried.values())
        return {"bad": bad, "lost": len(self._lost), "stay": self.stays, "lacking": len(self._lacking)}

    def exchange(self, sums: dict[str, int], *, records: bool, tolerant: bool) -> None:
        """Get what only other ranks know. Every rank has to call it, with the sums of `told`."""
        # The sums are equal on all ranks, so all take the same branches and call the same collectives.
        engine = self._engine
        if self.stays and records:
            engine.r2.begin(sums["salt"], self._replica[0])
        if sums["lacking"]:
            agreed(problem_of("exchange routes", engine.r2.fetch, self._lacking, self._replica[1]), {})
        if sums["bad"] and self._stages is not None:
            what = "tell which samples are bad"
            agreed(problem_of(what, _tell, self.carried, self._stages, "pipeline rank"), {})
        if sums["lost"]:
            agreed(problem_of("tell which samples are lost", self._tell_lost), {})
            due: list[Any] = [one for key, one in self._lost.items() if key in self._due]
            agreed(due[0] if due and not tolerant else None, {})

    def _tell_lost(self) -> None:
        """Refuse on all ranks what one can't read: the ranks of a replica may be on several nodes."""
        if dist.is_initialized():
            _tell(self._lost, dist.group.WORLD, "rank")
        self._engine.routes.refuse(self._lost)


def _tell(found: dict[int, Routes], ranks: Any, called: str) -> None:
    """Mark as bad on all ranks of a group what is bad on any. Every one of them has to call it."""
    group = RankGroup(ranks, PATIENCE, "not all ranks told which samples are bad", "a rank that failed")
    outcome = Outcome()
    bad = {key: one for key, one in found.items() if isinstance(one, InvalidRoutes)}
    mine: dict[int, Any] = {
        key: {"problem": "these routes can't be used, as others before them"} for key in bad
    }
    for key, error in itertools.islice(bad.items(), _WORDS):
        values = {"expected": error.expected, "got": error.got}
        told = {name: None if value is None else as_text(value) for name, value in values.items()}
        mine[key] = {"problem": error.problem, "where": error.where, "cause": error.cause, **told}
    for rank, theirs in enumerate(outcome.agree(group, mine)):
        for key in theirs.keys() - bad.keys():
            bad[key] = found[key] = InvalidRoutes(**theirs[key]).at(f"{called} {rank}")
    if outcome.error is not None:
        raise outcome.error
