"""torch_npu: there, not there, or failing; torch.cuda that means the NPU; operators that leave no top-k."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import npu_device
from npu_replay.compat import torch_npu

TESTS = Path(__file__).parents[1]
STAND_IN = TESTS / "device" / "stand_in"

simulated = pytest.mark.skipif(bool(npu_device.lacking()), reason=npu_device.lacking() or "simulated NPU")


def child(code: str, *paths: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [*map(str, paths), os.environ.get("PYTHONPATH", "")]))
    plain = {name: value for name, value in os.environ.items() if name != torch_npu.AUTOLOAD}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=plain | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables,
        text=True,
        capture_output=True,
        check=False,
    )


# Is it there, and does it load?


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A torch_npu as it is without CANN; torch finds it by its entry point and loads it by itself."""
    package = tmp_path / "torch_npu"
    about = tmp_path / "torch_npu-2.7.1.dist-info"
    for folder in (package, about):
        folder.mkdir()
    (package / "__init__.py").write_text("raise ImportError('libhccl.so: cannot open shared object file')")
    (package / "version.py").write_text("__version__ = '2.7.1'")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_npu\nVersion: 2.7.1\n")
    (about / "entry_points.txt").write_text("[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
    return tmp_path


@pytest.mark.slow
def test_a_torch_npu_that_fails_says_why_and_leaves_the_cpu(broken: Path) -> None:
    assert torch_npu.load() == "torch_npu is not installed"  # in this process
    code = (
        "from npu_replay import devices; from npu_replay.compat import torch_npu;"
        "print(torch_npu.load()); print(devices.available(), devices.pick('auto')); print(torch_npu.remedy())"
    )
    why, kinds, remedy = child(code, broken, TORCH_DEVICE_BACKEND_AUTOLOAD="0").stdout.splitlines()
    assert (why, kinds) == ("ImportError: libhccl.so: cannot open shared object file", "['cpu'] cpu")
    assert "set_env.sh" in remedy
    assert f"export {torch_npu.AUTOLOAD}=0" in remedy


@pytest.mark.slow
def test_importing_npu_replay_survives_a_torch_npu_that_takes_torch_with_it(broken: Path) -> None:
    done = child("import npu_replay, os, torch; print(torch.ones(2).sum(), dict(os.environ))", broken)
    assert done.stdout.startswith("tensor(2.)")
    assert torch_npu.AUTOLOAD not in done.stdout, "the environment is as it was"
    assert "libhccl.so" in done.stderr
    off = child("import npu_replay", broken, NPU_REPLAY_DISABLE="1")
    assert off.returncode != 0, "turned off it does nothing for torch"
    assert "Failed to load the backend extension" in off.stderr


# torch.cuda that lies


@pytest.mark.slow
@simulated
def test_where_torch_cuda_means_the_npu_nobody_takes_it_for_cuda() -> None:
    code = """
import npu_replay, torch
from npu_replay import devices
from npu_replay.compat import torch_npu
torch_npu.load(); torch_npu.stand_in_for_cuda()
assert torch.cuda.is_available()
states = {one.name: one.state for one in npu_replay.report().capabilities}
print(states["NPU"], states["CUDA"])
print(devices.available(), devices.pick("auto"), torch.ones(1, device="cuda").device)
"""
    done = child(code, STAND_IN, TESTS)
    assert done.stdout.splitlines() == ["works missing", "['npu', 'cpu'] npu npu:0"], done.stderr
