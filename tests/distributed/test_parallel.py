"""Record, collect and replay in real parallel training: a job of several processes against one process alone.

parallel_cases.py is one process: it has the cases and what is checked in each.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import jobs
from distributed import parallel_cases

KEPT = ("tp2-kept", "pp2-vp2-kept", "hybrid-pp2-kept", "tp2-pp2-kept")
"""What .ci/run has without recompute; of the other ways to split it has full recompute alone."""
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
        self._references = folder
        self._wanted = wanted
        self._found: dict[int, Lines] = {}
        problem, _ = launch("reference", 1, folder)
        assert not problem, f"the reference, one process alone, failed:\n{problem}"

    def lines(self, processes: int, case: str) -> Lines:
        """What every rank noted about a case."""
        if processes not in self._found:
            self._found[processes] = self._run(processes)
        return [line for line in self._found[processes] if line["case"] == case]

    def _run(self, processes: int) -> Lines:
        cases = self._wanted[processes]
        found = []
        for _ in range(LAUNCHES):
            problem, lines = launch("cases", processes, self._references, cases)
            found += lines
            if not problem:
                break
            last = lines[-1]["case"] if lines else cases[0]
            found.append({"case": last, "check": "*", "problem": problem, "skipped": ""})
            cases = cases[cases.index(last) + 1 :]
            if not cases:
                break
        return found


def launch(
    what: str, processes: int, references: Path, cases: Sequence[str] = (), timeout: float = 400
) -> tuple[str, Lines]:
    """Run a function of parallel_cases; return its problem, if any, and what its ranks noted, in order."""
    task = {"references": str(references), "cases": list(cases)}
    folder = Path(tempfile.mkdtemp(dir=references))
    ended = jobs.start(
        f"distributed.parallel_cases:{what}", task, ranks=processes, timeout=timeout, folder=folder
    )
    problem = "\n".join(one.problem for one in ended if one.problem)
    lines = [
        json.loads(line) | {"rank": path.stem.split("-")[1]}
        for path in sorted(folder.glob("results-*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    return problem, sorted(lines, key=lambda line: line["at"])


@pytest.fixture(scope="module")
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Jobs of those cases that a selected test asks for."""
    calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    asked = {(params["processes"], params["case"]) for params in calls if "processes" in params}
    wanted = {
        processes: [name for name in parallel_cases.names(processes) if (processes, name) in asked]
        for processes in parallel_cases.CASES
    }
    return Jobs(tmp_path_factory.mktemp("parallel"), wanted)


def depth(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.long] if name.endswith("-kept") and name not in KEPT else []


@pytest.mark.parametrize(
    ("processes", "case", "check"),
    [
        pytest.param(processes, name, check, marks=depth(name))
        for processes in parallel_cases.CASES
        for name in parallel_cases.names(processes)
        for check in parallel_cases.checks_of(name)
    ],
)
def test_parallel_training_is_recorded_and_replayed(
    trained: Jobs, processes: int, case: str, check: str
) -> None:
    lines = trained.lines(processes, case)
    skipped = {line["skipped"] for line in lines} - {""}
    if skipped:
        pytest.skip(skipped.pop())
    ended = "\n".join(line["problem"] for line in lines if line["check"] == "*")
    # Every rank noted that the check holds.
    noted = [line for line in lines if line["check"] == check]
    problems = [f"rank {line['rank']}: {line['problem']}" for line in noted if line["problem"]]
    assert not problems, "\n".join(problems)
    assert len(noted) == processes, ended or "the launch never got to this case"
