"""Jobs of verl's engines, of ROLL's strategy and of split models: cases one by one, and what each rank noted.

A module of cases has `prepare()`, which lends what this machine lacks, and CASES, functions by name that
assert on every rank.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import jobs
import npu_replay

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
    imports: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Notes:
    """What the ranks noted of each case that was selected of the tests in the request's file.

    Args:
        module: of tests/, with the cases.
        ranks: how many processes.
        cuda: lend them what Megatron asks of CUDA. Models of transformers are loaded with rubbish in it.
        imports: what else takes long to import: one process does, and the ranks are its forks.
        env: more of the environment.
    """
    notes: Notes = {}
    here = [item for item in request.session.items if item.path == request.path]
    asked = [item for item in here if request.fixturename in item.fixturenames]  # type: ignore[attr-defined]
    left: list[str] = [item.callspec.params["case"] for item in asked]  # type: ignore[attr-defined]
    for launch in range(LAUNCHES):
        folder = folders.mktemp(f"launch-{launch}")
        ended = jobs.start(
            "case_jobs:main",
            {"cases": left, "module": module, "cuda": cuda, "imports": list(imports)},
            ranks=ranks,
            before="case_jobs:prepare",
            # The routes are such as no router would choose, and verl's entropy is compiled anew in each job.
            env={"NPU_REPLAY_MIN_OVERLAP": "0", "TORCHDYNAMO_DISABLE": "1"} | dict(env or {}),
            timeout=1500,
            silence=SILENCE,
            folder=folder,
        )
        output = "\n".join(process.problem for process in ended if process.problem)
        for file in sorted(folder.glob("rank-*.jsonl")):
            for note in map(json.loads, file.read_text().splitlines()):
                notes.setdefault(note["case"], []).append(note)
        whole = [len(notes.get(case, [])) == ranks and not _problems(notes, case) for case in left]
        if all(whole):
            if output:  # a rank that fails behind its last case
                notes[left[-1]].append({"problem": f"the job ended:\n{output}"})
            break
        failed = whole.index(False)
        notes.setdefault(left[failed], []).append({"problem": f"the job ended:\n{output}"})
        left = left[failed + 1 :]
        if not left:
            break
    return notes


def check(notes: Notes, case: str) -> None:
    """Assert that a case went well on every rank."""
    assert case in notes, "not run"
    assert not (problems := _problems(notes, case)), "\n\n".join(problems)


def _problems(notes: Notes, case: str) -> list[str]:
    return [note["problem"] for note in notes[case] if note["problem"]]


# In the processes

_lent = contextlib.ExitStack()
"""What is lent for good: these processes do nothing else."""


def prepare(task: dict[str, Any]) -> None:
    """Import the framework and the cases, in the process whose forks are the ranks."""
    if task["cuda"]:
        _lent.enter_context(npu_replay.compat.cpu.lend())
    importlib.import_module(task["module"]).prepare()
    for name in task["imports"]:
        importlib.import_module(name)


def main(task: dict[str, Any]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    cases = importlib.import_module(task["module"]).CASES
    for name in task["cases"]:
        _note(Path(task["folder"]), name, cases[name])
    dist.destroy_process_group()


def _note(folder: Path, name: str, case: Callable[[], None]) -> None:
    """Run a case, and write down what went wrong. The ranks part for good where it goes wrong on one."""
    try:
        case()
        problem = ""
    except BaseException:
        problem = traceback.format_exc()
    with (folder / f"rank-{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps({"case": name, "problem": problem}) + "\n")
    if problem:
        raise SystemExit(f"{name}: {problem}")


# For cases


class Cases(dict[str, Callable[[], None]]):
    """Functions by name."""

    def named(self, name: str) -> Callable[[Any], Any]:
        """Add a case under a name."""

        def add(run: Callable[[], None]) -> Callable[[], None]:
            self[name] = run
            return run

        return add


def shared_folder() -> str:
    """A new one, the same on all ranks."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    return folder[0]


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """The lines for an operator; they are there after the block."""
    log = logging.getLogger("npu_replay.job")
    handler = BufferingHandler(1000)
    lines = list[str]()
    log.addHandler(handler)
    yield lines
    log.removeHandler(handler)
    lines += [record.getMessage() for record in handler.buffer]
