"""What `bash ci/device.sh --rollout` starts, with a tiny model: its rows decoded, counted and compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SAMPLES = [96 + 8 + 12 * number for number in range(32)]
"""The tokens of each prompt; each gets 128 more, of which the last isn't run."""


def test_a_start_is_decoded_counted_and_held_against_another(saved: Any, tmp_path: Path) -> None:
    model, folder = saved("Qwen3Moe", num_hidden_layers=2)
    command = [sys.executable, str(ROOT / "ci" / "rollout_device.py"), str(folder)]
    for name, against in (("first", ()), ("second", ("--against", str(tmp_path / "first.out")))):
        out = tmp_path / f"{name}.out"
        done = subprocess.run(
            [*command, str(out), "--mode", "eager", *against], capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(out.read_text())
        assert (found["vllm_ascend"], found["mode"]) == ("", "eager")
        assert found["layers"] == model.config.num_hidden_layers
        assert found["rows"] == sum(SAMPLES) + 32 * 127
    assert found["differs_from_eager"] < 0.01
