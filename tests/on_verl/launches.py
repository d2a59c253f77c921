"""Cases that run one after the other in the processes of one job, and what each rank noted of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

import jobs

LAUNCHES = 4
"""A case that fails takes its launch down; so often are the rest started again."""
SILENCE = 240
"""Seconds without the end of a case, on a busy machine and the first one's imports included."""

Notes = dict[str, list[dict[str, Any]]]


def noted(
    request: pytest.FixtureRequest,
    folders: pytest.TempPathFactory,
    module: str,
    *,
    ranks: int,
    cuda: bool = False,
    env: Mapping[str, str] | None = None,
) -> Notes:
    """What the ranks noted of each case that was selected of the tests in the request's file.

    Args:
        module: of this folder; its CASES, after its `prepare()`.
        ranks: how many processes.
        cuda: lend them what Megatron asks of CUDA. Models of transformers are loaded with rubbish in it.
        env: more of the environment.
    """
    found: Notes = {}
    here = [item for item in request.session.items if item.path == request.path]
    asked = [item for item in here if request.fixturename in item.fixturenames]  # type: ignore[attr-defined]
    left: list[str] = [item.callspec.params["case"] for item in asked]  # type: ignore[attr-defined]
    for launch in range(LAUNCHES):
        folder = folders.mktemp(f"launch-{launch}")
        ended = jobs.start(
            "on_verl.engine_worker:main",
            {"cases": left, "module": module, "cuda": cuda},
            ranks=ranks,
            # The routes are such as no router would choose, and verl's entropy is compiled anew in each job.
            env={"NPU_REPLAY_MIN_OVERLAP": "0", "TORCHDYNAMO_DISABLE": "1"} | dict(env or {}),
            timeout=1500,
            silence=SILENCE,
            folder=folder,
        )
        output = "\n".join(one.problem for one in ended)
        for file in sorted(folder.glob("rank-*.jsonl")):
            for line in file.read_text().splitlines():
                note = json.loads(line)
                found.setdefault(note["case"], []).append(note)
        failed = [
            case
            for case in left
            if len(found.get(case, [])) != ranks or any(note["problem"] for note in found[case])
        ]
        if not failed:
            break
        found.setdefault(failed[0], []).append({"problem": f"the job ended:\n{output}"})
        left = left[left.index(failed[0]) + 1 :]
        if not left:
            break
    return found


def check(notes: Notes, case: str) -> None:
    """Assert that a case went well on every rank."""
    problems = [note["problem"] for note in notes.get(case, [{"problem": "not run"}]) if note["problem"]]
    assert not problems, "\n\n".join(problems)
