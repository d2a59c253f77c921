"""Finds the routes of a batch before its pass, and lets the ranks tell each other about them.

There is a class for each way by which routes come: fetched by reference (R3), in the batch (R3), or recorded
here (R2). They are of this rank's layers; the batch has keys in their place meanwhile. A sample that is bad
in one pipeline stage's layers, or can't be read on one rank, takes the routers' own choice on all.
"""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

import torch.distributed as dist

from npu_replay.compat.engines import setting
from npu_replay.compat.verl.batch_routes import Routes, are_keys, by_reference, keys_in, references_in
from npu_replay.compat.verl.engine_adapter import together
from npu_replay.compat.verl.files import ROUTES, TOKENS
from npu_replay.compat.verl.tensors import GivenRoutes
from npu_replay.environment import DELIVERY
from npu_replay.errors import InvalidRoutes, ReplayError, as_text
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.parallel.rank_failures import PATIENCE, Outcome, RankGroup, agreed
from npu_replay.routers import find, labels_of

logger = logging.getLogger(__name__)

_WORDS = 16
"""The number of errors whose full text other ranks are told: enough where a whole node is lost."""


class Delivery:
    """Holds what one pass knows of its batch's routes before its schedule; here nothing.

    Attributes:
        keys: of the batch's samples, in the place of routes during the pass.
        carried: by key, what the batch brought of this rank's layers.
        stays: whether R2 keeps its routes on the ranks that record them.
        counted: microseconds and bytes.
    """

    stays = False

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.keys: list[int | None] = []
        self.carried: dict[int, Routes] = {}
        self.counted: dict[str, int] = {}

    def told(self, *, records: bool) -> dict[str, int]:
        """Return what the other ranks have to know, as numbers to be summed."""
        return {"bad": 0, "lost": 0, "lacking": 0}

    def exchange(self, sums: dict[str, int], *, records: bool, tolerant: bool) -> None:
        """Get what only other ranks know. Every rank has to call it, with the sums of `told`."""
        # The sums are equal on all ranks, so all take the same branches and call the same collectives.
        if sums["bad"]:
            with together("tell which samples are bad"):
                self._tell_bad()
        if sums["lost"]:
            self._tell_lost({}, set(), tolerant)

    def _tell_bad(self) -> None:
        """Tell the ranks of this one's pipeline, which hold other layers of the same samples."""
        if int(getattr(self._engine.model, "pipeline_model_parallel_size", 1)) > 1:
            stages = ParallelLayout.from_megatron(self._engine.model).groups[1]
            _tell(self.carried, stages, "pipeline rank")

    def _tell_lost(self, lost: dict[int, Routes], due: set[int], tolerant: bool) -> None:
        """Refuse on all ranks what one can't read: the ranks of a replica may be on several nodes."""
        with together("tell which samples are lost"):
            if dist.is_initialized():
                _tell(lost, dist.group.WORLD, "rank")
            self._engine.routes.refuse(lost)
        errors: list[Any] = [error for key, error in lost.items() if key in due]
        agreed(errors[0] if errors and not tolerant else None, {})


class Referred(Delivery):
    """R3 by reference: fetches the routes of this rank's layers."""

    def __init__(self, engine: Any, data: Any, references: list[Any]) -> None:
        super().__init__(engine)
        self.keys = keys_in(data.get(ROUTES, None), references)
        tokens = zip(self.keys, data[TOKENS].unbind(), strict=False)
        # Why samples have no routes on this rank, then on any, by key; the keys that verl hasn't rejected.
        self._lost: dict[int, Routes] = {}
        self._lost |= engine.r3.receive(references, {key: ids for key, ids in tokens if key})
        masks = data.get("response_mask", None)
        answered = [True] * len(self.keys) if masks is None else [row.any() for row in masks.unbind()]
        self._due = {
            key for key, has_response in zip(self.keys, answered, strict=False) if key and has_response
        }

    def told(self, *, records: bool) -> dict[str, int]:
        return super().told(records=records) | {"lost": len(self._lost)}

    def _tell_lost(self, lost: dict[int, Routes], due: set[int], tolerant: bool) -> None:
        super()._tell_lost(self._lost, self._due, tolerant)


class Carried(Delivery):
    """R3 with ids in the batch: checks them."""

    def __init__(self, engine: Any, data: Any) -> None:
        super().__init__(engine)
        routes = GivenRoutes.of(data[ROUTES], None, engine.model)
        self.carried = routes.checked(engine.routes.layers, data.get(TOKENS, None))
        self.keys = list(self.carried)

    def told(self, *, records: bool) -> dict[str, int]:
        bad = sum(isinstance(routes, InvalidRoutes) for routes in self.carried.values())
        return super().told(records=records) | {"bad": bad}


class Stayed(Delivery):
    """R2 whose routes stay on the ranks that record them: looks up which of the batch's are elsewhere."""

    stays = True

    def __init__(self, engine: Any, data: Any) -> None:
        super().__init__(engine)
        self._replica = engine.engine.get_data_parallel_rank(), engine.engine.get_data_parallel_group()
        self._wanted = [key for key in keys_in(data.get(ROUTES, None)) if key] if engine.routes.layers else []
        self._lacking: list[int] = []

    def told(self, *, records: bool) -> dict[str, int]:
        self._lacking = [] if records else self._engine.routes.lacking(self._wanted)
        return super().told(records=records) | {"lacking": len(self._lacking)}

    def exchange(self, sums: dict[str, int], *, records: bool, tolerant: bool) -> None:
        if records:
            self._engine.r2.begin(sums["salt"], self._replica[0])
        if sums["lacking"]:
            with together("exchange routes"):
                self._engine.r2.fetch(self._lacking, self._replica[1])


def found_in(engine: Any, data: Any) -> Delivery:
    """Get the routes of a batch, as far as this rank can before the schedule."""
    started = time.perf_counter()
    delivered = _received(engine, data) if engine.from_rollout else _staying(engine, data)
    delivered.counted = {
        "microseconds": int((time.perf_counter() - started) * 1e6),
        "bytes": engine.routes.nbytes,
    }
    return delivered


def _received(engine: Any, data: Any) -> Delivery:
    references = references_in(data)
    routes = data.get(ROUTES, None)
    if references is not None:
        _hold(engine, by_reference=True)
        return Referred(engine, data, references)
    if routes is None or not routes.is_nested or are_keys(routes, fetched=bool(engine.routes.layers)):
        return Delivery(engine)
    _hold(engine)
    return Carried(engine, data)


def _staying(engine: Any, data: Any) -> Delivery:
    if not by_reference():  # batches carry ids
        return Delivery(engine)
    if setting(engine.engine.engine_config, "dynamic_context_parallel"):
        if not engine.met:
            logger.warning("[npu_replay] under dynamic_context_parallel %s has no effect in R2", DELIVERY)
        return Delivery(engine)
    _hold(engine, by_reference=True)
    return Stayed(engine, data)


def _hold(engine: Any, *, by_reference: bool = False) -> None:
    """Set which layers the engine's store of routes has: those of this rank."""
    ReplayError.unless(
        not by_reference or engine.files is None or engine.files.record is None,
        "routes that aren't in batches can't be written to files",
        f"no {DELIVERY}, or no router_replay.record_file",
        "both",
        "a rank has its own layers alone",
    )
    routers = itertools.chain.from_iterable(find(list(engine.chunks)))
    engine.routes.has(labels_of(sorted(routers, key=lambda router: router.label)))


def _tell(routes: dict[int, Routes], ranks: Any, called: str) -> None:
    """Mark as bad on all ranks of a group what is bad on any. Every one of them has to call it."""
    group = RankGroup(ranks, PATIENCE, "not all ranks told which samples are bad", "a rank that failed")
    outcome = Outcome()
    bad = {key: sample for key, sample in routes.items() if isinstance(sample, InvalidRoutes)}
    mine: dict[int, Any] = {
        key: {"problem": "these routes can't be used, as others before them"} for key in bad
    }
    for key, error in itertools.islice(bad.items(), _WORDS):
        values = {"expected": error.expected, "got": error.got}
        texts = {name: None if value is None else as_text(value) for name, value in values.items()}
        mine[key] = {"problem": error.problem, "where": error.where, "cause": error.cause, **texts}
    for rank, theirs in enumerate(outcome.agree(group, mine)):
        for key in theirs.keys() - bad.keys():
            bad[key] = routes[key] = InvalidRoutes(**theirs[key]).at(f"{called} {rank}")
    if outcome.error is not None:
        raise outcome.error
