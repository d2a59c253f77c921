"""One process of a job: what it runs, and how Megatron is started in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import npu_replay
from distributed import parallel_cases


@contextmanager
def _started() -> Iterator[None]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=100))
    with npu_replay.compat.cpu.lend():
        yield
    dist.destroy_process_group()


def cases(task: dict[str, Any]) -> None:
    """The cases of these names."""
    with _started():
        parallel_cases.run(Path(task["folder"]), task["cases"], Path(task["references"]))


def refer(task: dict[str, Any]) -> None:
    """The reference, with one process."""
    with _started():
        parallel_cases.refer(Path(task["references"]))
