"""verl's own Megatron engine, workers and losses in a job of two processes: engine_cases.py says what runs.

case_jobs.py runs all cases that were asked for; what each rank noted is what is asserted here. The newest
release runs each way once; older ones those where verl's own code differs, and of these as many as it takes
that R2, R3, packing and splits of each kind have been there. The rest are `long`.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import pytest

from case_jobs import Notes, check, noted
from zoo import hybrid

WORKERS = ("verl.workers.engine_workers",)
VPP = "pp2, two virtual stages and a dense chunk"  # T3
DENSE = "pp2 and a stage of dense layers"  # T43

BY_RELEASE = (
    *(f"R2: {VPP}", "R3: tp2 with sequence parallel", "R2: dynamic micro-batches"),
    f"R3 by reference: {VPP}",
    "R2 by reference: cp2",  # keys where releases narrow ids to a byte
    "without its adapter",
    "routes are missing",  # T20
    "one rank has routes of another length",  # T12
    "more experts than a byte holds",  # T19
    "R3: pp2 of padded sequences",
)
"""Where verl's own code differs from release to release: how it packs, merges, narrows and hands on."""
AT_BOTH_ENDS = ("R2: cp2", "reference and critic")  # T26
"""0.8 packs as 0.9 does, and else does as 0.7: there they and the next are long."""
ALIKE = (
    "a worker that marks no batch",
    *("R2: groups by sigmoid and a bias", "R2: tp2 of padded sequences"),
    *(f"R2: {DENSE}", f"R3: {DENSE}", "R2: full recompute", "R2: ep2"),
    "padded sequences that have other rows",
    f"R2 by reference: {DENSE}",
    "R2 by reference: samples that another replica trains on",
    "R3 by reference: a sample that one rank can't read",
    *("R2: an aux loss of each sequence", "a sample that was rejected"),
    "routes in files",
    "two mini-batches and two epochs",
    "settings, and routes far from the routers' own choice",
    "one rank fails in a way that nobody has thought of",
    "bad samples after the first step",
    "one rank has bad routes in the first step",
)
FROM_0_16 = ("R2: pp2 of a HybridModel", "R3 by reference: pp2 of a HybridModel")
"""From this Megatron-core on."""
EVERY = [
    f"{way}{reference}: {split}"
    for way in ("R2", "R3")
    for reference in ("", " by reference")
    for split in ("dp2", "pp2", VPP, DENSE, "cp2", "tp2 with sequence parallel", "full recompute", "ep2")
]
ACTOR = (f"R3: {DENSE}", f"R2: {VPP}", "R3: cp2", "R2: dynamic micro-batches", "without its adapter")
ACTOR_TOO = ("R2: tp2 with sequence parallel", "R2: full recompute")

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # the first test waits for all cases
]


def _here() -> Iterable[Any]:
    """Those that this release of verl has the code for."""
    release = version("verl")
    yield from BY_RELEASE
    between = [pytest.mark.long] * release.startswith("0.8")
    yield from (pytest.param(case, marks=between) for case in AT_BOTH_ENDS)
    from_0_16 = () if hybrid.missing() else FROM_0_16
    yield from from_0_16
    yield from (pytest.param(case, marks=pytest.mark.newest) for case in ALIKE)
    rest = (case for case in EVERY if case not in {*BY_RELEASE, *AT_BOTH_ENDS, *from_0_16, *ALIKE})
    yield from (pytest.param(case, marks=[pytest.mark.newest, pytest.mark.long]) for case in rest)
    if release.startswith("0.7."):
        yield from (f"0.7's actor, {case}" for case in ACTOR)
        yield from (pytest.param(f"0.7's actor, {case}", marks=pytest.mark.long) for case in ACTOR_TOO)


@pytest.fixture(scope="module")
def notes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Notes:
    """What both ranks noted of each case that was selected."""
    return noted(request, tmp_path_factory, "on_verl.engine_cases", ranks=2, cuda=True, imports=WORKERS)


@pytest.mark.parametrize("case", list(_here()))
def test_verls_own_engine_and_actor(notes: Notes, case: str) -> None:
    check(notes, case)
