"""Child processes: one way to start them, and to hear what they found.

A target is «module:function» of tests/. It is called with its task, and what it returns comes back as JSON.
The ranks of a job are forks of its leader, and that is a fork of a process that has imported torch, with what
Megatron imports of it, and nothing else: which comes first, npu_replay or a framework, is up to the target.
The leader of a `fresh` job is a new interpreter, and variables are set before anything but Python's own is
imported.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import multiprocessing
import os
import secrets
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
_TAIL = 6000
_QUIET = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A busy machine takes more than Ray's half a minute to start a node.
    "RAY_agent_register_timeout_ms": "150000",
    "RAY_raylet_start_wait_time_s": "150",
    "RAY_worker_niceness": "0",  # Ray gives its workers 15, and beside another test they hardly run
}


@dataclass(frozen=True)
class Ended:
    """A process that has ended, well or not.

    Attributes:
        code: its exit code; negative for a signal.
        answer: what the target returned; None where it didn't.
        output: all that it wrote to stdout and stderr.
    """

    name: str
    code: int
    answer: Any
    output: str

    @property
    def problem(self) -> str:
        """What went wrong, with the end of what it wrote; empty if it ended well."""
        return f"{self.name} ended with {self.code}\n{self.output[-_TAIL:]}" if self.code else ""


def run(target: str, task: Mapping[str, Any] | None = None, **how: Any) -> Any:
    """What `target` returns in one process; an error with all that it wrote if the process fails."""
    return run_ranks(target, task, 1, **how)[0]


def run_ranks(target: str, task: Mapping[str, Any] | None, ranks: int, **how: Any) -> list[Any]:
    """What it returns on each of several ranks."""
    ended = start(target, task, ranks=ranks, **how)
    problems = [process.problem for process in ended if process.problem]
    if problems:
        raise RuntimeError("\n\n".join(problems))
    return [process.answer for process in ended]


def by_case(target: str, ranks: int) -> dict[str, list[str]]:
    """What each rank that knows a case found of it, where each returns a dict of cases."""
    answers: dict[str, list[str]] = {}
    for answer in run_ranks(target, None, ranks):
        for case, what in answer.items():
            answers.setdefault(case, []).append(what)
    return answers


def start(
    target: str,
    task: Mapping[str, Any] | None = None,
    *,
    ranks: int = 1,
    fresh: bool = False,
    before: str = "",
    env: Mapping[str, str | None] | None = None,
    path: Sequence[Path | str] = (),
    timeout: float = 280,
    silence: float | None = None,
    folder: Path | None = None,
) -> list[Ended]:
    """Run `target` in `ranks` processes until all have ended, or one has failed: then the others are killed.

    Args:
        task: what the target is called with, JSON; it finds "rank", "world", "folder" (a path) and "store" (a
            file for a FileStore) in it too. Each has RANK, WORLD_SIZE and a store that outlives it in its
            environment, as torchrun has them: `init_process_group("gloo")` is all it takes.
        folder: where the processes may leave files; one of their own, which goes with them, if none is given.
        before: what all ranks need and takes long, as what they import: a target, called with rank 0's task
            in the leader.
        env: variables to change in the process; None takes one away.
        path: folders that come first in sys.path, and in PYTHONPATH of its children.
        timeout: seconds until all are killed; below pytest's own limit, which would lose what they wrote.
        silence: seconds after which they are killed when none has written to a file of its folder.
    """
    from torch.distributed import TCPStore

    with ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="npu_replay_")))
        files = folder or own / "files"
        files.mkdir(exist_ok=True)
        # The store that torchrun's agent keeps for its ranks.
        rendezvous = TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        whole_task = {**(task or {}), "world": ranks, "folder": str(files), "store": str(own / "store")}
        processes = [
            _Process(own, rank, target, whole_task, env or {}, path, rendezvous) for rank in range(ranks)
        ]
        leader = (_SPAWN if fresh else _FORKSERVER).Process(target=_lead, args=(own, ranks, before))
        leader.start()
        try:
            why = _wait(leader, processes, files, timeout, silence)
        finally:
            leader.kill()
            with contextlib.suppress(ProcessLookupError):  # it had no group yet, or nobody is left in it
                os.killpg(leader.pid, signal.SIGKILL)
            leader.join()
        return [process.ended(leader, why) for process in processes]


class _Process:
    """One rank."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        target: str,
        task: dict[str, Any],
        env: Mapping[str, str | None],
        path: Sequence[Path | str],
        rendezvous: Any,
    ) -> None:
        ranks = task["world"]
        self.name = f"{target}, rank {rank} of {ranks}"
        self._folder = folder
        self._rank = rank
        self._ended = folder / f"{rank}.code"
        token = folder / f"{rank}.token"  # Ray would write one into the home folder
        token.write_text(secrets.token_hex(32))
        changes: dict[str, str | None] = _QUIET | {"TMPDIR": str(folder), "RAY_AUTH_TOKEN_PATH": str(token)}
        changes |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rendezvous.port)}
        changes |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{ranks}"}
        changes["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        first = [*map(str, path), str(TESTS)]
        changes["PYTHONPATH"] = os.pathsep.join([*first, *filter(None, [os.environ.get("PYTHONPATH")])])
        changes |= env
        call = {"target": target, "task": task | {"rank": rank}, "path": first, "env": changes}
        (folder / f"{rank}.task").write_text(json.dumps(call), encoding="utf-8")

    def code(self, leader: BaseProcess) -> int | None:
        """Its exit code; None while it runs."""
        of_leader = leader.exitcode  # first: it writes before it ends
        return int(self._ended.read_text()) if self._ended.exists() else of_leader

    def ended(self, leader: BaseProcess, why: str) -> Ended:
        answer = self._folder / f"{self._rank}.answer"
        code = self.code(leader) or 0
        result = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else None
        file = self._folder / f"{self._rank}.output"
        output = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        return Ended(
            self.name,
            code or (0 if answer.exists() else 1),
            result,
            output + ("" if self._ended.exists() else why),
        )


_SPAWN = multiprocessing.get_context("spawn")
_FORKSERVER = multiprocessing.get_context("forkserver")
# Of the 3 s that a Megatron takes to be imported, 2.8 are torch's own compiler and its distributed packages.
_FORKSERVER.set_forkserver_preload(
    ["torch", "torch._inductor.compile_fx", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
)


def _lead(folder: Path, ranks: int, before: str) -> None:
    """In the leader: do what comes before the ranks, fork them, and note how each of them ended."""
    os.setsid()  # its ranks, and what they start, are killed as one group
    task = _enter(folder, 0)["task"]
    running: dict[int, int] = {}
    try:
        if before:
            _called(before, task)
        gc.freeze()  # a collection in a rank looks at what it makes, and not at all that was imported
        for rank in range(ranks):
            process = os.fork()
            if process == 0:
                _work(folder, rank)
            running[process] = rank
        while running:
            process, status = os.wait()
            if process not in running:
                continue  # a child of what came before
            code = folder / f"{running.pop(process)}.code"
            written = code.with_suffix(".written")
            written.write_text(str(os.waitstatus_to_exitcode(status)), encoding="utf-8")
            written.rename(code)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _called(target: str, task: Mapping[str, Any]) -> Any:
    module, _, function = target.partition(":")
    return getattr(importlib.import_module(module), function)(task)


def _wait(
    leader: BaseProcess, processes: Sequence[_Process], files: Path, timeout: float, silence: float | None
) -> str:
    """Until all have ended, or one has failed: its peers would wait for it. Why they are killed, if so."""
    began = heard = time.monotonic()
    written = -1
    while True:
        codes = [process.code(leader) for process in processes]
        if any(codes) or None not in codes:
            return (
                "\nkilled: another rank, or what comes before all of them, had failed" if any(codes) else ""
            )
        now = time.monotonic()
        size = sum(file.stat().st_size for file in files.rglob("*") if file.is_file())
        if size != written:
            heard = now
            written = size
        if now - began > timeout:
            return f"\nkilled after {timeout:.0f} s"
        if silence is not None and now - heard > silence:
            return f"\nkilled: nothing was written for {silence:.0f} s"
        time.sleep(0.02)


def _work(folder: Path, rank: int) -> None:
    """In a rank: call the target, and leave its answer.

    The interpreter doesn't end by itself: gloo's threads may make an abort of that.
    """
    call = _enter(folder, rank)
    code = 1
    try:
        result = _called(call["target"], call["task"])
        (folder / f"{rank}.answer").write_text(json.dumps(result), encoding="utf-8")
        code = 0
    except SystemExit as stopped:
        code = int(bool(stopped.code))
        print(stopped, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _enter(folder: Path, rank: int) -> dict[str, Any]:
    """Take a rank's output, folder, variables and path; what it was given."""
    call: dict[str, Any] = json.loads((folder / f"{rank}.task").read_text(encoding="utf-8"))
    output = os.open(folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # kept when it is killed
    os.chdir(folder)
    for name, value in call["env"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    sys.argv[1:] = []  # MindSpeed reads it
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    sys.path[:] = [*call["path"], *(entry for entry in sys.path if entry not in call["path"])]
    return call


def printed(code: str, **how: Any) -> Any:
    """What `code` prints in its last line, JSON, in a process that has imported torch alone."""
    return run("jobs:_printed", {"code": code}, **how)


def _printed(task: Mapping[str, Any]) -> Any:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(task["code"], "<code>", "exec"), {"__name__": "__main__", "json": json, "sys": sys})
    return json.loads(out.getvalue().splitlines()[-1])


def tests(task: Mapping[str, Any]) -> int:
    """A target: the exit status of pytest with the task's "arguments", in the repository."""
    import pytest

    os.chdir(TESTS.parent)
    return int(pytest.main(task["arguments"]))
