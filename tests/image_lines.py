"""examples/verl/replay_lines.py in a simulated image: nothing else is on its path."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ascend_images
from ascend_images import Image

SCRIPT = Path(__file__).parents[1] / "examples" / "verl" / "replay_lines.py"


def made(image: Image, folder: Path, *, installed: bool = True) -> Path:
    """Return a folder that simulates an image, with npu_replay's metadata; a clone on PYTHONPATH has none."""
    ascend_images.make(image, folder)
    if installed:
        info = folder / "npu_replay-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: npu-replay\nVersion: 0.1.0\n")
        (info / "entry_points.txt").write_text("[verl.plugins]\nnpu_replay = npu_replay_autoload.verl\n")
    else:
        (folder / "npu_replay").mkdir()
        (folder / "npu_replay" / "__init__.py").touch()
    return folder


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run it with these arguments, in an environment that holds these variables alone."""
    command = [sys.executable, "-S", str(SCRIPT), *words]
    variables = {"PYTHONPATH": str(folder), **environment}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=False)


def printed(folder: Path, *words: str, **environment: str) -> str:
    done = run(folder, *words, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout
