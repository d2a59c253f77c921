"""What is measured of importing npu_replay: processes of their own that import torch first, then npu_replay.

Each process gives a time for all steps, so that how fast torch loads today is in both sides of a ratio.
"""

from __future__ import annotations

import json
import subprocess
import sys

STEPS = {
    "torch": "import torch",
    "then npu_replay": "import npu_replay",
    "then its record": "npu_replay.record",
}
"""What a process does, by name, in order; the first is the yardstick."""


def times(rounds: int) -> dict[str, list[float]]:
    """Microseconds from the start of the first step to the end of each: one figure a process."""
    found: dict[str, list[float]] = {name: [] for name in STEPS}
    for number in range(rounds + 1):
        spent = _spent()
        if number > 0:  # the first one warms the disk's cache up
            for name, until in zip(STEPS, spent, strict=True):
                found[name].append(1e6 * until)
    return found


def least(over: dict[str, float]) -> str:
    """The fastest of the processes in words, from microseconds beyond torch at the end of each step."""
    parts = (f"{name} {1e-3 * beyond:,.1f}" for name, beyond in over.items())
    return f"import, least of all processes, in ms beyond torch: {', '.join(parts)}"


def _spent() -> list[float]:
    lines = ["import json, time", "ends = [time.perf_counter()]"]
    for step in STEPS.values():
        lines += [step, "ends.append(time.perf_counter())"]
    lines.append("print(json.dumps([end - ends[0] for end in ends[1:]]))")
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, text=True, capture_output=True, check=True)
    spent: list[float] = json.loads(done.stdout.splitlines()[-1])
    return spent
