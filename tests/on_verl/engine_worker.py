"""One process of a job of two that torchrun starts: engine_worker.py FOLDER CASE ..."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import npu_replay

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]


def main(folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    with npu_replay.compat.cpu.lend():
        import engine_cases
        import engine_job

        engine_job.prepare()
        cases = dict(engine_cases.CASES)
        if importlib.util.find_spec("verl.workers.actor") is not None:
            cases |= importlib.import_module("actor_cases").CASES
        for name in names:
            _note(folder, name, cases[name])
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
