"""What takes a process: a pipe, a log, Ctrl-C, a reader that goes. Each starts another way."""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from npu_replay import RoutedExperts

NOISE = """
import logging, os, warnings
from npu_replay import devices
pick = devices.pick

def noisy(name):
    print("noise of print")
    os.write(1, b"noise of C on stdout\\n")
    os.write(2, b"noise of C on stderr\\n")
    warnings.warn("noise of warnings")
    logging.getLogger("torch").warning("noise of a logger")
    return pick(name)

devices.pick = noisy
from npu_replay.cli import main
main()
"""
NOISES = ("of print", "of C on stdout", "of C on stderr", "of warnings", "of a logger")
WAITS = """
import sys, threading
from npu_replay.doctor import diagnose

def waits(*, imports):
    sys.stderr.write("waiting\\n")
    threading.Event().wait()

diagnose.diagnose = waits
from npu_replay.cli import main
main()
"""


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    ids = torch.rand(40, 3, 16, generator=torch.Generator().manual_seed(0)).topk(4).indices
    RoutedExperts(ids=ids, layers=range(3), num_experts=16).save(tmp_path / "a.routes")
    return tmp_path


def environment(**more: str) -> dict[str, str]:
    gone = ("COLUMNS", "RANK", "WORLD_SIZE", "PYTHONUNBUFFERED")
    path = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    known = {name: value for name, value in os.environ.items() if name not in gone}
    return known | {"TERM": "xterm", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)} | more


def run(
    desk: Path, *arguments: str, code: str = "", stdout: int = subprocess.PIPE, **variables: str
) -> subprocess.CompletedProcess[str]:
    how = ["-c", code] if code else ["-m", "npu_replay"]
    return subprocess.run(
        [sys.executable, *how, *arguments],
        cwd=desk,
        env=environment(**variables),
        text=True,
        stdout=stdout,
        stderr=subprocess.PIPE,
        check=False,
    )


@pytest.mark.slow
def test_what_others_print_is_in_the_log_of_a_smoke_that_failed(tmp_path: Path) -> None:
    done = run(tmp_path, "smoke", "--device", "npu", "--json", code=NOISE)
    assert done.returncode == 1, done.stderr
    assert [result["result"] for result in json.loads(done.stdout)["results"]] == ["FAIL"]
    log = Path(re.findall(r"others go to (.+)", done.stderr)[0])
    text = log.read_text()
    log.unlink()
    assert [noise for noise in NOISES if f"noise {noise}" not in text] == []
    assert "noise" not in done.stderr
    assert "npu-replay-smoke" in log.name


@pytest.mark.slow
def test_ctrl_c_ends_without_a_traceback(tmp_path: Path) -> None:
    job = subprocess.Popen(
        [sys.executable, "-c", WAITS, "doctor"],
        cwd=tmp_path,
        env=environment(),
        text=True,
        stderr=subprocess.PIPE,
        # A job in the background of a script ignores Ctrl-C, and so would what it starts.
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    with job:
        assert job.stderr
        stderr = "".join(itertools.takewhile(lambda line: line != "waiting\n", job.stderr))
        job.send_signal(signal.SIGINT)
        stderr += job.communicate()[1]
    assert job.returncode == 130
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_a_reader_that_goes_leaves_no_traceback(desk: Path) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "wb") as pipe:
        done = run(desk, "inspect", "a.routes", stdout=pipe.fileno())
    assert done.stderr == ""
    assert done.returncode == 141
