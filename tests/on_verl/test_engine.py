"""verl's own Megatron engine, workers and losses in a job of two processes: engine_cases.py says what runs.

engine_worker.py runs all cases; what each rank noted is what is asserted here.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import pytest

import jobs

LAUNCHES = 4
"""A case that fails takes its launch down; so often are the rest started again."""
SILENCE = 240
"""Seconds without the end of a case, on a busy machine and the first one's imports included."""

SPLITS = (
    "dp2",
    "pp2",
    "pp2 and a stage of dense layers",  # T43
    "pp2, two virtual stages and a dense chunk",  # T3
    "tp2 with sequence parallel",
    "cp2",
    "full recompute",
    "ep2",
)
CASES = (
    *(f"{mode}: {split}" for split in SPLITS for mode in ("R2", "R3")),
    "R2: dynamic micro-batches",
    "two mini-batches and two epochs",
    "reference and critic",  # T26
    "the actor without its adapter",
    "a second engine",
    "offloaded in between",
    "a checkpoint in between",
    "routes in files",
    "switched off",
    "a rollout's routes under R2",  # T4
    "routes are missing",  # T20
    "a setting of one rank's own",
    "one rank fails in a way that nobody has thought of",
    "bad samples after the first step",
    "one rank has bad routes in the first step",
    "one rank has routes of another length",  # T12
)

ACTOR = (
    *(
        f"0.7's actor, {mode}: {split}"
        for split in (
            "dp2",
            "pp2",
            "pp2 and a stage of dense layers",
            "tp2 with sequence parallel",
            "cp2",
        )
        for mode in ("R2", "R3")
    ),
    "0.7's actor, R2: pp2, two virtual stages and a dense chunk",
    "0.7's actor, R2: dynamic micro-batches",
    "0.7's actor, R2: full recompute",
    "0.7's actor without its adapter",
)
RELEASE = version("verl")

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # the first test waits for all cases
]

Notes = dict[str, list[dict[str, Any]]]


def _here(cases: tuple[str, ...]) -> list[str]:
    """Those that this release of verl has the code for."""
    if cases is CASES:  # 0.7.0's engine has no router replay
        return [] if RELEASE.startswith("0.7.0") else list(cases)
    if not RELEASE.startswith("0.7."):
        return []
    # 0.7.0's worker has no LoRA.
    return [case for case in cases if not (RELEASE.startswith("0.7.0") and case.endswith("adapter"))]


@pytest.fixture(scope="module")
def notes(tmp_path_factory: pytest.TempPathFactory) -> Notes:
    """What both ranks noted of each case."""
    found: Notes = {}
    left = _here(CASES) + _here(ACTOR)
    for launch in range(LAUNCHES):
        folder = tmp_path_factory.mktemp(f"launch-{launch}")
        ended = jobs.start(
            "on_verl.engine_worker:main",
            {"cases": left},
            ranks=2,
            # the routes are such as no router would choose
            env={"NPU_REPLAY_MAX_LIVE_MISMATCH": "1"},
            timeout=1500,
            silence=SILENCE,
            folder=folder,
        )
        output = "\n".join(one.problem for one in ended)
        for file in sorted(folder.glob("rank-*.jsonl")):
            for line in file.read_text().splitlines():
                note = json.loads(line)
                found.setdefault(note["case"], []).append(note)
        for case in left:
            if len(found.get(case, [])) != 2 or any(note["problem"] for note in found[case]):
                found.setdefault(case, []).append({"problem": f"the job ended:\n{output}"})
                left = left[left.index(case) + 1 :]
                break
        else:
            break
        if not left:
            break
    return found


@pytest.mark.parametrize("case", _here(CASES))
def test_verls_own_engine(notes: Notes, case: str) -> None:
    _check(notes, case)


@pytest.mark.parametrize("case", _here(ACTOR))
def test_the_workers_own_actor(notes: Notes, case: str) -> None:
    _check(notes, case)


def _check(notes: Notes, case: str) -> None:
    problems = [note["problem"] for note in notes.get(case, [{"problem": "not run"}]) if note["problem"]]
    assert not problems, "\n\n".join(problems)
