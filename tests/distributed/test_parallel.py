"""Record, collect and replay in real parallel training: a job of several processes against one process alone.

torchrun starts parallel_worker.py; parallel_cases.py has the cases and what is checked in each.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from distributed import parallel_cases, parallel_failures

WORKER = Path(__file__).with_name("parallel_worker.py")
LAUNCHES = 4
"""A case that fails takes its launch down; so often are the rest started again."""

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.distributed,
    pytest.mark.timeout(900),  # the first test of a size waits for all cases of that size
]

Lines = list[dict[str, Any]]


class Jobs:
    """Runs the jobs of each size once, when the first test asks."""

    def __init__(self, folder: Path, wanted: dict[int, list[str]]) -> None:
        self._folder = folder
        self._wanted = wanted
        self._found: dict[int, Lines] = {}
        code, output = launch(1, folder, [])
        assert code == 0, f"the reference, one process alone, failed:\n{output}"

    def lines(self, processes: int, case: str) -> Lines:
        """What every rank noted about a case."""
        if processes not in self._found:
            self._found[processes] = self._run(processes)
        return [line for line in self._found[processes] if line["case"] == case]

    def _run(self, processes: int) -> Lines:
        cases, found = self._wanted[processes], []
        for _ in range(LAUNCHES):
            folder = self._folder / f"{processes}-{len(cases)}"
            folder.mkdir()
            for reference in self._folder.glob("*.pt"):
                (folder / reference.name).symlink_to(reference)
            code, output = launch(processes, folder, cases)
            lines = noted(folder)
            found += lines
            if code == 0:
                break
            last = lines[-1]["case"] if lines else cases[0]
            found.append({"case": last, "check": "*", "problem": output, "skipped": ""})
            cases = cases[cases.index(last) + 1 :]
            if not cases:
                break
        return found


def launch(processes: int, folder: Path, cases: Sequence[str], timeout: float = 400) -> tuple[int, str]:
    """Start a job on a port of its own; return its exit code and the end of what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", str(WORKER), str(folder), *cases]
    path = os.pathsep.join([str(WORKER.parents[1]), os.environ.get("PYTHONPATH", "")])
    own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(folder)}
    environment = os.environ | own | {"PYTHONPATH": path}
    with (folder / "output").open("w+") as output:
        job = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = job.wait(timeout)
        except subprocess.TimeoutExpired:
            code = -1
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
        output.seek(0)
        return code, f"exit code {code} (-1: after {timeout} s)\n{output.read()[-4000:]}"


def noted(folder: Path) -> Lines:
    """What the ranks wrote down, in the order of time."""
    lines = [
        json.loads(line) | {"rank": path.stem.split("-")[1]}
        for path in sorted(folder.glob("results-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return sorted(lines, key=lambda line: line["at"])


@pytest.fixture(scope="module")
def jobs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Jobs of those cases that a selected test asks for."""
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = {(params["processes"], params["case"]) for params in calls if "processes" in params}
    wanted = {
        processes: [name for name in parallel_cases.names(processes) if (processes, name) in asked]
        for processes in parallel_cases.CASES
    }
    return Jobs(tmp_path_factory.mktemp("parallel"), wanted)


@pytest.fixture(scope="module")
def failures(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """What two ranks noted about errors; the job ends with one."""
    folder = tmp_path_factory.mktemp("failures")
    code, output = launch(2, folder, ["failures"], timeout=100)
    lines = noted(folder)
    assert code == 1, output
    return lines


@pytest.mark.parametrize(
    ("processes", "case", "check"),
    [
        (processes, name, check)
        for processes in parallel_cases.CASES
        for name in parallel_cases.names(processes)
        for check in parallel_cases.checks_of(name)
    ],
)
def test_parallel_training_is_recorded_and_replayed(
    jobs: Jobs, processes: int, case: str, check: str
) -> None:
    lines = jobs.lines(processes, case)
    skipped = {line["skipped"] for line in lines} - {""}
    if skipped:
        pytest.skip(skipped.pop())
    ended = "\n".join(line["problem"] for line in lines if line["check"] == "*")
    _assert_holds(lines, check, processes, ended or "the launch never got to this case")


@pytest.mark.parametrize("check", parallel_failures.CHECKS)
def test_an_error_on_one_rank_is_an_error_on_all(failures: Lines, check: str) -> None:
    _assert_holds(failures, check, 2, "a rank ended another way")


def test_the_other_ranks_hear_of_it_in_time(failures: Lines) -> None:
    at = [line["at"] for line in failures if line["check"] == parallel_failures.CHECKS[-1]]
    assert max(at) - min(at) < 20


def _assert_holds(lines: Lines, check: str, processes: int, else_: str) -> None:
    """Every rank noted that the check holds."""
    found = [line for line in lines if line["check"] == check]
    problems = [f"rank {line['rank']}: {line['problem']}" for line in found if line["problem"]]
    assert not problems, "\n".join(problems)
    assert len(found) == processes, else_
