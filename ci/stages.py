"""Run the stages of .ci/run, several at a time, and print how long each of them took.

    python ci/stages.py [--lanes 2] [--table FILE] <STAGES

Each line of STAGES is a name, a tab or two spaces, and a command of bash. They start in this order. What a
stage prints is shown when it has ended, and the table goes to FILE, too. Where a stage fails the others run,
and the exit status is 1.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

ONE_CORE = {"NPU_REPLAY_WORKERS": "1", "OMP_NUM_THREADS": "1"}
"""What a stage is told that shares the machine with another: to keep one core busy."""


@dataclass(frozen=True)
class Ended:
    """One stage that has ended: its exit status, its seconds, and all that it printed."""

    name: str
    status: int
    seconds: float
    output: str

    @property
    def verdict(self) -> str:
        return "passed" if not self.status else f"FAILED ({self.status})"


def read(lines: Iterable[str]) -> list[tuple[str, str]]:
    """Return the name and the command of each line.

    >>> read(["types  ci/types.sh", "", "# a comment", "verl 0.9.1\\tci/verl.sh 0.9.1"])
    [('types', 'ci/types.sh'), ('verl 0.9.1', 'ci/verl.sh 0.9.1')]
    """
    wanted = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    parts = [re.split(r"\t+| {2,}", line, maxsplit=1) for line in wanted]
    if unclear := [line for line, part in zip(wanted, parts, strict=True) if len(part) != 2]:
        raise ValueError(f"a stage is a name, two spaces and a command, and not {unclear[0]!r}")
    return [(name, command) for name, command in parts]


def run(name: str, command: str) -> Ended:
    """Run one stage to its end."""
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | ONE_CORE,
        )
        status = process.wait()
        log.seek(0)
        return Ended(name, status, time.monotonic() - started, log.read())


def table(ended: Sequence[Ended], seconds: float) -> str:
    """Return the seconds of the stages, longest first, as a table of Markdown."""
    rows = sorted(ended, key=lambda one: -one.seconds)
    lines = ["| stage | seconds | |", "|---|---|---|"]
    lines += [f"| {one.name} | {one.seconds:.0f} | {one.verdict} |" for one in rows]
    return "\n".join([*lines, f"| all, beside each other | {seconds:.0f} | |"])


def main(arguments: Sequence[str]) -> int:
    """Run the stages of standard input and return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lanes", type=int, default=2, help="stages at a time")
    parser.add_argument("--table", type=Path, help="a file for the table")
    asked = parser.parse_args(arguments)
    stages = read(sys.stdin)
    started, ended = time.monotonic(), []
    with ThreadPoolExecutor(asked.lanes) as lanes:
        for done in as_completed([lanes.submit(run, *stage) for stage in stages]):
            one = done.result()
            ended.append(one)
            print(f"== {one.name}: {one.verdict}, {one.seconds:.0f} s\n{one.output}", flush=True)
    told = table(ended, time.monotonic() - started)
    if asked.table is not None:
        asked.table.parent.mkdir(parents=True, exist_ok=True)
        asked.table.write_text(told + "\n", encoding="utf-8")
    print(told)
    return int(any(one.status for one in ended))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
