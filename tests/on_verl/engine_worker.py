"""One process of a job: the cases of these names, and what it noted of each."""

from __future__ import annotations

import importlib
import json
import time
import traceback
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import npu_replay


def main(task: dict[str, Any]) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with npu_replay.compat.cpu.lend() if task["cuda"] else nullcontext():
        cases = importlib.import_module(f"on_verl.{task['module']}")
        cases.prepare()
        for name in task["cases"]:
            _note(Path(task["folder"]), name, cases.CASES[name])
    dist.destroy_process_group()


def _note(folder: Path, name: str, case: object) -> None:
    """Run a case, and write down what went wrong. The ranks part for good where it goes wrong on one."""
    started = time.monotonic()
    try:
        case()  # type: ignore[operator]
        problem = ""
    except BaseException:
        problem = traceback.format_exc()
    seconds = round(time.monotonic() - started, 1)
    with (folder / f"rank-{dist.get_rank()}.jsonl").open("a") as file:
        file.write(json.dumps({"case": name, "problem": problem, "seconds": seconds}) + "\n")
    if problem:
        raise SystemExit(f"{name}: {problem}")
