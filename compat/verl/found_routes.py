"""Finds the routes of a batch before its pass, and lets the ranks tell each other about them.

Routes come in three ways: fetched by reference (R3), in the batch (R3), or recorded here (R2). They are of
this rank's layers; the batch has keys in their place meanwhile. A sample that can't be read on one rank takes
the routers' own choice on all; what is wrong with ids in the batch, each rank finds by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from npu_replay.compat.engines import setting
from npu_replay.compat.verl.batch_routes import Routes, are_keys, by_reference, keys_in, references_in
from npu_replay.compat.verl.engine_adapter import together
from npu_replay.compat.verl.files import ROUTES, TOKENS
from npu_replay.compat.verl.tensors import GivenRoutes
from npu_replay.environment import DELIVERY
from npu_replay.errors import InvalidRoutes, ReplayError
from npu_replay.parallel.rank_failures import gathered
from npu_replay.routers import find, labels_of


@dataclass
class Delivery:
    """Holds what one pass knows of its batch's routes before its schedule; by default nothing.

    Attributes:
        keys: of the batch's samples, in the place of routes during the pass.
        carried: by key, what the batch brought of this rank's layers (R3 with ids in the batch).
        lost: why samples have no routes on this rank, by key (R3 by reference).
        stays: whether R2 keeps its routes on the ranks that record them.
        lacking: the keys that a replay of such routes looks up, and that another rank has.
    """

    keys: list[int | None] = field(default_factory=list)
    carried: dict[int, Routes] = field(default_factory=dict)
    lost: dict[int, InvalidRoutes] = field(default_factory=dict)
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
        keys = keys_in(routes, references)
        tokens = zip(keys, data[TOKENS].unbind(), strict=False)
        lost = engine.r3.receive(references, {key: ids for key, ids in tokens if key})
        return Delivery(keys=keys, lost=lost)
    if routes is None or not routes.is_nested or are_keys(routes, fetched=bool(engine.routes.layers)):
        return Delivery()
    _hold(engine)
    carried = GivenRoutes.of(routes, None, engine.model).checked(engine.routes.layers, data[TOKENS])
    return Delivery(keys=list(carried), carried=carried)


def _staying(engine: Any, data: Any) -> Delivery:
    # Under dynamic context parallelism the ranks of a sample differ between its passes.
    if not by_reference() or setting(engine.engine.engine_config, "dynamic_context_parallel"):
        return Delivery()  # batches carry ids
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
    routers = chain.from_iterable(find(list(engine.chunks)))
    engine.routes.has(labels_of(sorted(routers, key=lambda router: router.label)))


def faults_of(delivered: Delivery, *, records: bool) -> dict[str, int]:
    """Return what the other ranks have to know, as numbers to be summed."""
    return {"lost": len(delivered.lost), "lacking": 0 if records else len(delivered.lacking)}


def exchange(engine: Any, delivered: Delivery, sums: dict[str, int], *, records: bool) -> None:
    """Get what only other ranks know. Every rank has to call it, with the sums of `faults_of`."""
    # The sums are equal on all ranks, so all take the same branches and call the same collectives.
    if records and delivered.stays:
        engine.r2.begin(sums["salt"], engine.engine.get_data_parallel_rank())
    if sums["lost"]:
        with together("tell which samples are lost"):
            engine.routes.refuse(_lost_anywhere(delivered.lost))
    if sums["lacking"]:
        with together("exchange routes"):
            engine.r2.fetch(delivered.lacking, engine.engine.get_data_parallel_group())


def _lost_anywhere(lost: dict[int, InvalidRoutes]) -> dict[int, InvalidRoutes]:
    """Return what any rank has lost: the ranks of a replica may be on several nodes. All have to call it."""
    first = next((str(error) for error in lost.values()), "")
    of_all = dict(lost)
    for rank, (keys, why) in enumerate(gathered(([*lost], first))):
        problem = f"rank {rank} can't read the routes of {len(keys)} samples"
        error = InvalidRoutes(problem, expected="all of them", got=f"for the first «{why}»")
        of_all = dict.fromkeys(keys, error) | of_all
    return of_all
