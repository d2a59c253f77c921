"""Processes that stop in the middle of writing a file."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

HANGING_WRITER = """
import os, sys, time
from npu_replay import RoutedExperts
import torch
def hang(_):
    print("written", flush=True)
    sys.stdin.read(1)
os.fsync = hang
ids = torch.rand(5000, 2, 8).topk(2).indices
RoutedExperts(ids=ids, layers=(1, 4), num_experts=8).save(sys.argv[1], overwrite=True)
"""


@contextlib.contextmanager
def hanging_writer(path: Path, program: str = HANGING_WRITER) -> Iterator[subprocess.Popen[str]]:
    """A process that has written all of a file and not yet given it its name; a byte lets it go on."""
    arguments = [sys.executable, "-c", program, str(path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        try:
            yield process
        finally:
            process.kill()


def go_on(process: subprocess.Popen[str]) -> None:
    process.communicate("x", timeout=60)
    assert process.returncode == 0
