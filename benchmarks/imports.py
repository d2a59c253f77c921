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
_PROCESS = f"""
import json, time
begun, ends = time.perf_counter(), []
for step in {list(STEPS.values())}:
    exec(step)
    ends.append(1e6 * (time.perf_counter() - begun))
print(json.dumps(ends))
"""


def times(rounds: int) -> dict[str, list[float]]:
    """Microseconds from the start of the first step to the end of each: one figure a process."""
    found = []
    for _ in range(rounds + 1):
        done = subprocess.run([sys.executable, "-c", _PROCESS], text=True, capture_output=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    return dict(
        zip(STEPS, map(list, zip(*found[1:], strict=True)), strict=True)
    )  # the first warms up the disk


def least(over: dict[str, float]) -> str:
    """The fastest of the processes in words, from microseconds beyond torch at the end of each step.

    >>> least({"then npu_replay": 2300.0})
    'least of all processes, in ms beyond torch: then npu_replay 2.3'
    """
    parts = (f"{name} {1e-3 * beyond:,.1f}" for name, beyond in over.items())
    return f"least of all processes, in ms beyond torch: {', '.join(parts)}"
