"""verl's own Megatron engine, workers and losses in a job of two processes: engine_cases.py says what runs.

engine_worker.py runs all cases that were asked for; what each rank noted is what is asserted here.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

import hybrid_model
from on_verl.launches import Notes, check, noted

VPP = "pp2, two virtual stages and a dense chunk"  # T3
DENSE = "pp2 and a stage of dense layers"  # T43

BY_RELEASE = (
    *("R2: dp2", f"R2: {VPP}", f"R3: {VPP}", "R3: tp2 with sequence parallel", "R2: cp2"),
    "R2: dynamic micro-batches",
    *(f"R3 by reference: {VPP}", f"R2 by reference: {VPP}"),
    "reference and critic",  # T26
    "without its adapter",
    "offloaded in between",
    "a checkpoint in between",
    "routes in files",
    "a rollout's routes under R2",  # T4
    "routes are missing",  # T20
    "one rank has routes of another length",  # T12
)
"""Where verl's own code differs from release to release: how it packs, merges, narrows and hands on."""
ALIKE = (
    *("R3: dp2", "R2: pp2", "R3: pp2", f"R2: {DENSE}", f"R3: {DENSE}", "R2: tp2 with sequence parallel"),
    *("R3: cp2", "R2: full recompute", "R3: full recompute", "R2: ep2", "R3: ep2"),
    *("R2 by reference: dp2", f"R2 by reference: {DENSE}", "R2 by reference: cp2"),
    *("R2 by reference: a sample of padding", "R2 by reference: a batch that has routes already"),
    *("R2 by reference: one rank fails", "a last row that verl leaves out"),
    *("R2 by reference: samples that another replica trains on", "R2 by reference, on one rank alone"),
    *("R3 by reference: a sample that one rank can't read", "R3 by reference: the time of a fetch"),
    *("R3 by reference: dp2", f"R3 by reference: {DENSE}", "R3 by reference: cp2"),
    "two mini-batches and two epochs",
    "a second engine",
    "the way from verl's flag to a session",
    "switched off",
    "a setting of one rank's own",
    "a sample that is bad in one stage's layers",
    "routes far from the routers' own choice",
    "one rank fails in a way that nobody has thought of",
    "bad samples after the first step",
    "one rank has bad routes in the first step",
)
HYBRID = tuple(f"{way}: pp2 of a HybridModel" for way in ("R2", "R3", "R3 by reference"))
ACTOR = tuple(
    f"0.7's actor, {case}"
    for case in (
        *(f"{mode}: {split}" for split in ("dp2", "pp2", DENSE) for mode in ("R2", "R3")),
        *(f"{mode}: {split}" for split in ("tp2 with sequence parallel", "cp2") for mode in ("R2", "R3")),
        *(f"R2: {VPP}", "R2: dynamic micro-batches", "R2: full recompute"),
        "without its adapter",
    )
)

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # the first test waits for all cases
]


def _here() -> list[Any]:
    """Those that this release of verl has the code for."""
    release = version("verl")
    found: list[Any] = []
    if not release.startswith("0.7.0"):  # its engine has no router replay, and its worker no LoRA
        alike = [*ALIKE, *(() if hybrid_model.missing() else HYBRID)]
        found = [*BY_RELEASE, *(pytest.param(case, marks=pytest.mark.newest) for case in alike)]
    if release.startswith("0.7."):
        found += [case for case in ACTOR if release != "0.7.0" or not case.endswith("adapter")]
    return found


@pytest.fixture(scope="module")
def notes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Notes:
    """What both ranks noted of each case that was selected."""
    return noted(request, tmp_path_factory, "engine_cases", ranks=2, cuda=True)


@pytest.mark.parametrize("case", _here())
def test_verls_own_engine_and_actor(notes: Notes, case: str) -> None:
    check(notes, case)
