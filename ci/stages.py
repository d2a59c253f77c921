"""Run the stages of .ci/run, two at a time, and print how long each of them took.

    python ci/stages.py TABLE <STAGES

Each line of STAGES is a name, two spaces, and a command of bash. They start in this order. What a stage
prints is shown when it has ended, and the table goes to the file TABLE, too. Where a stage fails the others
run, and the exit status is 1.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ONE_CORE = {"NPU_REPLAY_WORKERS": "1", "OMP_NUM_THREADS": "1"}
"""What a stage is told that shares the machine with another: to keep one core busy."""


def read(lines: Iterable[str]) -> list[tuple[str, str]]:
    """Return the name and the command of each line.

    >>> read(["site  ci/docs.sh", "", "verl 0.9.1   ci/verl.sh 0.9.1"])
    [('site', 'ci/docs.sh'), ('verl 0.9.1', 'ci/verl.sh 0.9.1')]
    """
    parts = [re.split(r" {2,}", line.strip(), maxsplit=1) for line in lines if line.strip()]
    return [(name, command) for name, command in parts]


def run(name: str, command: str) -> tuple[float, str, bool, str]:
    """Run one stage to its end; return its seconds, its row, whether it passed, and what it printed."""
    started = time.monotonic()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | ONE_CORE,
        check=False,
    )
    seconds = time.monotonic() - started
    verdict = f"FAILED ({done.returncode})" if done.returncode else "passed"
    report = f"== {name}: {verdict}, {seconds:.0f} s\n{done.stdout.decode('utf-8', 'replace')}"
    return seconds, f"| {name} | {seconds:.0f} | {verdict} |", not done.returncode, report


def main(table: Path) -> int:
    """Run the stages of standard input and return the exit status."""
    stages = read(sys.stdin)
    started = time.monotonic()
    ended = []
    with ThreadPoolExecutor(2) as lanes:
        for done in as_completed([lanes.submit(run, *stage) for stage in stages]):
            *row, report = done.result()
            ended.append(row)
            print(report, flush=True)
    rows = [row for _, row, _ in sorted(ended, reverse=True)]
    lines = ["| stage | seconds | |", "|---|---|---|", *rows]
    summary = "\n".join([*lines, f"| all, beside each other | {time.monotonic() - started:.0f} | |"])
    table.parent.mkdir(parents=True, exist_ok=True)
    table.write_text(summary + "\n", encoding="utf-8")
    print(summary)
    return int(not all(passed for *_, passed in ended))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
