"""Training in each state that npu_replay may have in a process, to the last bit.

A job is a module of tests/ with a function `run(ask)`. It trains, by what is in the copy of these tools that
`copy_tools` makes, and returns digests. What builds small models here imports npu_replay; the copy's name is
another (`lent`), and it is turned off. So where npu_replay is absent nothing of it is in the process.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

import jobs

ABSENT = "absent"
AGAIN = "asked and uninstalled"
STATES: dict[str, dict[str, str]] = {
    ABSENT: {},
    "installed": {},
    "NPU_REPLAY_AUTOLOAD=off": {"NPU_REPLAY_AUTOLOAD": "0"},
    "NPU_REPLAY_DISABLE=on": {"NPU_REPLAY_DISABLE": "1"},
    AGAIN: {},
}
"""The variables of each. A test may have others, in which npu_replay is imported by the job's own code."""
LOADED = ("installed", AGAIN)
"""Of these the states in which npu_replay is in the process."""
ROOT = Path(__file__).parents[1]


# In the test


def outcomes(
    job: str,
    folder: Path,
    *,
    states: Mapping[str, Mapping[str, str]] = STATES,
    imports: Sequence[str] = (),
    **more: Any,
) -> dict[str, Any]:
    """What the job returned in each state; each has a process, and they are forks of one without npu_replay.

    Args:
        folder: an empty one.
        states: their variables, by name.
        imports: what takes long to import and asks for no entry points; it is imported once.
        more: of the job's task.
    """
    from entry_points_job import points, write  # not in the processes, whose folder of tests is the copy

    copy_tools(folder / "tools")
    for name in ("True", "False"):
        write(folder / name, "npu-replay", points() if name == "True" else {})
    task = {**more, "job": job, "site": str(folder), "states": states, "imports": list(imports)}
    none = dict.fromkeys([name for name in os.environ if name.startswith("NPU_REPLAY_")])
    answers = jobs.run_ranks(
        "untouched:main",
        task,
        len(states),
        before="untouched:prepare",
        env={**none, "LENT_DISABLE": "1", "VERL_USE_EXTERNAL_MODULES": None, "TORCHDYNAMO_DISABLE": "1"},
        path=[folder / "tools"],
    )
    for state, answer in zip(states, answers, strict=True):
        assert answer["loaded"] == (state in LOADED or state not in STATES), f"{state}: {answer['loaded']}"
    return {state: answer["outcome"] for state, answer in zip(states, answers, strict=True)}


def copy_tools(folder: Path) -> None:
    """Copy npu_replay and what builds models in tests/, with another name for npu_replay."""
    folders = {ROOT / "npu_replay": "lent", ROOT / "compat": "lent/compat", ROOT / "tests": ""}
    for source, name in folders.items():
        for file in source.rglob("*.py"):
            if "untouched" in file.name or file.name.startswith("test_") or file.name == "conftest.py":
                continue
            copy = folder / name / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            text = file.read_text(encoding="utf-8").replace("npu_replay", "lent")
            copy.write_text(text.replace("NPU_REPLAY_", "LENT_"), encoding="utf-8")


# In the processes


def prepare(task: Mapping[str, Any]) -> None:
    for name in task["imports"]:
        importlib.import_module(name)
    assert not _loaded()


def main(task: dict[str, Any]) -> dict[str, Any]:
    """Enter this rank's state as an installation of it does, and run the job."""
    state = list(task["states"])[task["rank"]]
    os.environ.update(task["states"][state])
    sys.path.insert(0, f"{task['site']}/{state != ABSENT}")
    if state == ABSENT:  # a clone may be on the path
        sys.modules["npu_replay"] = sys.modules["npu_replay_autoload"] = None  # type: ignore[assignment]
    if state not in STATES:
        importlib.import_module("npu_replay")
    for group in ("verl.plugins", "vllm.general_plugins"):  # as verl 0.9 and vLLM do
        for point in entry_points(group=group, name="npu_replay"):
            register = point.load()
            if callable(register):
                register()
    outcome = importlib.import_module(task["job"]).run(task, ask=state == AGAIN)
    return {"loaded": _loaded(), "outcome": outcome}


def _loaded() -> bool:
    return sys.modules.get("npu_replay") is not None


def digest(tensors: Iterable[torch.Tensor | None]) -> str:
    """Of their bytes, names left out; None is one of them."""
    checksum = hashlib.sha256()
    for tensor in tensors:
        checksum.update(b"none" if tensor is None else tensor.detach().contiguous().numpy().tobytes())
    return checksum.hexdigest()
