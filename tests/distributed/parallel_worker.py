"""One process of a job that torchrun starts.

parallel_worker.py FOLDER CASE ...   the cases of these names
parallel_worker.py FOLDER failures   what happens when a rank has an error
parallel_worker.py FOLDER            the reference, with one process
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import npu_replay
from distributed import parallel_cases, parallel_failures


def main(folder: Path, cases: list[str]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    with npu_replay.compat.cpu.lend():
        if cases == ["failures"]:
            parallel_failures.run(folder)
        elif cases:
            parallel_cases.run(folder, cases)
        else:
            parallel_cases.refer(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
