"""Finds the routes of a batch before its pass, and lets the ranks tell each other about them.

Routes come in three ways: fetched by reference (R3), in the batch (R3), or recorded here (R2). They are of
this rank's layers; the batch has keys in their place meanwhile. A sample that is bad in one pipeline stage's
layers, or can't be read on one rank, takes the routers' own choice on all.
"""

from __future__ import annotations

import itertools
import logging
from dataclasses import dataclass, field
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


@dataclass
class Delivery:
    """Holds what one pass knows of its batch's routes before its schedule; by default nothing.

    Attributes:
        keys: of the batch's samples, in the place of routes during the pass.
        carried: by key, what the batch brought of this rank's layers (R3 with ids in the batch).
        lost: why samples have no routes on this rank, then on any, by key (R3 by reference).
        due: the keys of samples that verl hasn't rejected.
        stays: whether R2 keeps its routes on the ranks that record them.
        lacking: the keys that a replay of such routes looks up, and that another rank has.
    """

    keys: list[int | None] = field(default_factory=list)
    carried: dict[int, Routes] = field(default_factory=dict)
    lost: dict[int, Routes] = field(default_factory=dict)
    due: set[int] = field(default_factory=set)
    stays: bool = False
    lacking: list[int] = field(default_factory=list)


def found_in(engine: Any, data: Any) -> Delivery:
    """Get the routes of a batch, as far as this rank can before the schedule."""
    return _received(engine, data) if engine.from_rollout else _staying(engine, data)


def _received(engine: Any, data: Any) -> Delivery:
    references = references_in(data)
    routes = data.get(ROUTES, None)
    if references is not None:
        _hold(engine, by_reference=True)
        return _referred(engine, data, references)
    if routes is None or not routes.is_nested or are_keys(routes, fetched=bool(engine.routes.layers)):
        return Delivery()
    _hold(engine)
    carried = GivenRoutes.of(routes, None, engine.model).checked(engine.routes.layers, data.get(TOKENS, None))
    return Delivery(keys=list(carried), carried=carried)


def _referred(engine: Any, data: Any, references: list[Any]) -> Delivery:
    """Fetch the routes of this rank's layers (R3 by reference)."""
    keys = keys_in(data.get(ROUTES, None), references)
    tokens = zip(keys, data[TOKENS].unbind(), strict=False)
    lost = engine.r3.receive(references, {key: ids for key, ids in tokens if key})
    masks = data.get("response_mask", None)
    answered = [True] * len(keys) if masks is None else [row.any() for row in masks.unbind()]
    due = {key for key, has_response in zip(keys, answered, strict=False) if key and has_response}
    return Delivery(keys=keys, lost=lost, due=due)


def _staying(engine: Any, data: Any) -> Delivery:
    if not by_reference():  # batches carry ids
        return Delivery()
    if setting(engine.engine.engine_config, "dynamic_context_parallel"):
        if not engine.met:
            logger.warning("[npu_replay] under dynamic_context_parallel %s has no effect in R2", DELIVERY)
        return Delivery()
    _hold(engine, by_reference=True)
    keys = [key for key in keys_in(data.get(ROUTES, None)) if key] if engine.routes.layers else []
    return Delivery(stays=True, lacking=engine.routes.lacking(keys))


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


def faults_of(engine: Any, delivered: Delivery, *, records: bool) -> dict[str, int]:
    """Return what the other ranks have to know, as numbers to be summed."""
    return {
        "bad": sum(isinstance(routes, InvalidRoutes) for routes in delivered.carried.values()),
        "lost": len(delivered.lost),
        "lacking": 0 if records else len(delivered.lacking),
    }


def exchange(
    engine: Any, delivered: Delivery, sums: dict[str, int], *, records: bool, tolerant: bool
) -> None:
    """Get what only other ranks know. Every rank has to call it, with the sums of `faults_of`."""
    # The sums are equal on all ranks, so all take the same branches and call the same collectives.
    if records and delivered.stays:
        engine.r2.begin(sums["salt"], engine.engine.get_data_parallel_rank())
    if sums["bad"]:
        with together("tell which samples are bad"):
            # The ranks of this one's pipeline hold other layers of the same samples.
            if int(getattr(engine.model, "pipeline_model_parallel_size", 1)) > 1:
                _tell(
                    delivered.carried, ParallelLayout.from_megatron(engine.model).groups[1], "pipeline rank"
                )
    if sums["lost"]:
        # Refused on all ranks, as the ranks of a replica may be on several nodes.
        with together("tell which samples are lost"):
            if dist.is_initialized():
                _tell(delivered.lost, dist.group.WORLD, "rank")
            engine.routes.refuse(delivered.lost)
        errors: list[Any] = [error for key, error in delivered.lost.items() if key in delivered.due]
        agreed(errors[0] if errors and not tolerant else None, {})
    if sums["lacking"]:
        with together("exchange routes"):
            engine.r2.fetch(delivered.lacking, engine.engine.get_data_parallel_group())


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
