"""Scripts in Python processes of their own, with a `mindspeed` on the path: the real one, or the stand-in.

MindSpeed changes torch and Megatron for the whole process when it is imported, and reads sys.argv while it
does. So no test imports it: a worker does, in a process whose argv holds nothing, and gets its task on stdin.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, TextIO

TESTS = Path(__file__).parents[1]
STAND_IN, REAL = "stand-in", "real"
_OWN = (STAND_IN_FOLDER := Path(__file__).parent / "stand_in", STUBS := TESTS / "stubs", TESTS)
_TAIL = 6000


def run(product: str, script: Path | str, task: dict[str, Any], timeout: float = 200) -> dict[str, Any]:
    """Run `script` in one process; return the JSON object that it prints as its last line.

    Args:
        product: STAND_IN or REAL.
        task: what the script reads as JSON from its stdin (`read_task`).

    Raises:
        RuntimeError: if the process fails or prints no such line; with the end of what it wrote to stderr.
    """
    return run_ranks(product, script, task, 1, timeout)[0]


def run_ranks(
    product: str, script: Path | str, task: dict[str, Any], count: int, timeout: float = 200
) -> list[dict[str, Any]]:
    """The same in `count` processes; each finds its "rank", "world" and a "store" (a path) in its task."""
    with tempfile.TemporaryDirectory(prefix="npu_replay_") as folder:
        ranks = [_Process(product, Path(script), Path(folder), task, rank, count) for rank in range(count)]
        try:
            _wait(ranks, timeout)
        finally:
            for rank in ranks:
                rank.end()
        return [rank.answer() for rank in ranks]


@contextlib.contextmanager
def triton_at_import() -> Iterator[None]:
    """For a script: lend triton, where there is none, while MindSpeed is imported.

    Newer MindSpeed defines kernels when it is imported. What asks for triton later has to hear that there is
    none: torch, and MindSpeed's choice between a kernel and plain torch.
    """
    if PathFinder.find_spec("triton") is not None:
        yield
        return
    sys.path.append(str(STUBS / "at_import"))
    try:
        yield
    finally:
        sys.path.remove(str(STUBS / "at_import"))
        for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
            del sys.modules[name]
        sys.meta_path[:] = [finder for finder in sys.meta_path if type(finder).__module__ != "triton"]


def read_task() -> dict[str, Any]:
    """For a script: the task that it was started with."""
    return json.load(sys.stdin)


def answer(found: dict[str, Any]) -> None:
    """For a script: print what it found as its last line."""
    print(flush=True)
    print(json.dumps(found), flush=True)


def environment(product: str) -> dict[str, str]:
    """The environment of a process of this product."""
    folders = [str(TESTS)]
    if product == STAND_IN or not _has_torch_npu():
        folders.insert(0, str(STUBS))
    if product == STAND_IN:
        folders.insert(0, str(STAND_IN_FOLDER))
    inherited = os.environ.get("PYTHONPATH")
    return os.environ | {
        "PYTHONPATH": os.pathsep.join([*folders, *([inherited] if inherited else [])]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "1" if _has_torch_npu() else "0",
        "PYTHONDONTWRITEBYTECODE": os.environ.get("PYTHONDONTWRITEBYTECODE", ""),
    }


def real_mindspeed() -> str:
    """Where a real MindSpeed lies; empty if there is none."""
    spec = PathFinder.find_spec("mindspeed", _foreign_path())
    return "" if spec is None or spec.origin is None else spec.origin


@functools.cache
def _has_torch_npu() -> bool:
    """Can a real torch_npu be imported? One that is installed where its driver isn't can't."""
    if PathFinder.find_spec("torch_npu", _foreign_path()) is None:
        return False
    tried = subprocess.run([sys.executable, "-c", "import torch, torch_npu"], capture_output=True)
    return tried.returncode == 0


def _foreign_path() -> list[str]:
    return [folder for folder in sys.path if Path(folder or ".").resolve() not in _OWN]


class _Process:
    """One rank: a process whose stdout and stderr go to files, so that no pipe can fill up."""

    def __init__(
        self, product: str, script: Path, folder: Path, task: dict[str, Any], rank: int, count: int
    ) -> None:
        self.name = f"{script.name}, {product}, rank {rank} of {count}"
        self.product = product
        self.out = _opened(folder / f"{rank}.out")
        self.err = _opened(folder / f"{rank}.err")
        whole = task | {"product": product, "rank": rank, "world": count, "store": str(folder / "store")}
        with _opened(folder / f"{rank}.in") as given:
            given.write(json.dumps(whole))
            given.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, str(script)],
                stdin=given,
                stdout=self.out,
                stderr=self.err,
                cwd=folder,
                env=environment(product),
                text=True,
            )

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def answer(self) -> dict[str, Any]:
        """The last line of its stdout."""
        lines = _read(self.out).splitlines()
        if self.process.returncode == 0 and lines and lines[-1].startswith("{"):
            return json.loads(lines[-1])
        raise RuntimeError(
            f"{self.name} ended with {self.process.returncode} and no answer\n"
            f"--- end of stdout\n{_read(self.out)[-_TAIL // 4 :]}\n"
            f"--- end of stderr\n{_read(self.err)[-_TAIL:]}"
        )


def _opened(path: Path) -> TextIO:
    return path.open("w+", encoding="utf-8", errors="replace")


def _read(file: TextIO) -> str:
    file.flush()
    file.seek(0)
    return file.read()


def _wait(ranks: list[_Process], timeout: float) -> None:
    """Until all have ended, or one has failed: its peers would wait for it in a collective."""
    stop = time.monotonic() + timeout
    while any(rank.process.poll() is None for rank in ranks):
        failed = [rank for rank in ranks if rank.process.poll() not in (None, 0)]
        if failed:
            failed[0].answer()
        if time.monotonic() > stop:
            slow = next(rank for rank in ranks if rank.process.poll() is None)
            slow.end()
            slow.name += f", killed after {timeout:.0f} s"
            slow.answer()
        time.sleep(0.05)
    for rank in ranks:
        if rank.process.returncode != 0:
            rank.answer()
