"""Several processes of one script, and what each of them left in its file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def by_case(script: str, folder: Path, count: int) -> dict[str, list[str]]:
    """What each process found, by case, from the lines «case = result» of their files."""
    found: dict[str, list[str]] = {}
    for lines in run(script, folder, count):
        for line in lines:
            case, _, result = line.partition(" = ")
            found.setdefault(case, []).append(result)
    return found


def run(script: str, folder: Path, count: int, timeout: float = 200) -> list[list[str]]:
    """Start `script FOLDER RANK` for each rank; return the lines of its file, if all ended well."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(folder), str(rank)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * count, "\n".join(outputs)
    return [(folder / f"results-{rank}").read_text().splitlines() for rank in range(count)]
