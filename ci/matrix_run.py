"""Runs tests/matrix/ on releases that are fetched, in a process each, and says what each was shown to have.

    python ci/matrix_run.py [--all] [--check] [NAME ...]     # ci/matrix.sh fetches, and calls it

What a test shows is told by its mark; what the release has by itself, by a process without npu_replay
(tests/capabilities.py). Exit status 1: a test failed, or docs/dev/matrix.md says something else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from datetime import date
from typing import Any

import matrix_page
from matrix_page import CAPABILITIES, FAILS, MISSING, NATIVE, ROOT, SHIMMED, Shown

import jobs
import matrix

WORK = ROOT / ".work"
LOGS = WORK / "matrix"
TRANSFORMERS_TESTS = "tests/matrix/test_transformers.py"
LAST_LINES = 30
HOURS = 3600.0
STALE = "run bash ci/matrix.sh --all and commit docs/dev/matrix.md with docs/dev/matrix/"


@dataclass(frozen=True)
class Outcome:
    """What came of one release."""

    release: matrix.Release
    shown: Shown
    problems: tuple[str, ...]
    """One line each: a test that failed, a capability that nothing shows."""
    seconds: float

    said: str = ""
    """The end of what its tests printed, where one failed: the log may lie where nobody can look."""

    def line(self) -> str:
        verdict = f"{len(self.problems)} PROBLEMS" if self.problems else "ok"
        counts = f"{self.shown.passed} passed, {self.shown.skipped} not for this release"
        return f"{self.release.name}: {verdict}, {counts}, {self.seconds:.0f} s"


def run(release: matrix.Release, cases: str) -> Outcome:
    """Run the tests on one release.

    Args:
        cases: `all`, or the number of a hand (tests/dealt_cases.py).
    """
    started = time.monotonic()
    log, result = LOGS / f"{release.name}.log", LOGS / f"{release.name}.json"
    result.unlink(missing_ok=True)
    told = {"NPU_REPLAY_MATRIX_RESULT": str(result), "NPU_REPLAY_MATRIX_CASES": cases}
    select = [TRANSFORMERS_TESTS]
    if release.product == "megatron":
        select = ["tests/matrix", "--ignore", TRANSFORMERS_TESTS]
    arguments = ["-q", "-rsfE", "-p", "no:cacheprovider", *select]
    ended = _process(release, "jobs:tests", {"arguments": arguments}, told)
    status = ended.code or ended.answer
    log.write_text(ended.output, encoding="utf-8")
    found = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    shown, problems = judge(release.product, found, natives(release), "all" if cases == "all" else "a choice")
    if found and found.get(release.package) != release.version:
        problems = [f"what ran was {release.package} {found.get(release.package)}"]
    if not found or (status and not problems):
        unsaid = "" if found else " and left no result"
        problems = [f"pytest ended with {status}{unsaid}, see {log.relative_to(ROOT)}"]
    return Outcome(
        release,
        shown,
        tuple(problems),
        time.monotonic() - started,
        said=_end_of(ended.output) if status or not found else "",
    )


def _end_of(output: str) -> str:
    return "\n".join(f"    {line}" for line in output.splitlines()[-LAST_LINES:])


def _process(
    release: matrix.Release, target: str, task: Mapping[str, Any], environment: Mapping[str, str]
) -> jobs.Ended:
    """One of tests/jobs.py, with the release on its path."""
    folder = WORK / release.product / release.version
    return jobs.start(target, task, path=[folder], env=environment, timeout=HOURS)[0]


def natives(release: matrix.Release) -> Mapping[str, bool]:
    """What the release has by itself, asked in a process that never imports npu_replay."""
    ended = _process(
        release, "capabilities:natives", {"product": release.product}, {"NPU_REPLAY_DISABLE": "1"}
    )
    # If it fails its tests fail too, and say why.
    return ended.answer or dict.fromkeys(CAPABILITIES[release.product], False)


def judge(
    product: str, found: Mapping[str, Any], native: Mapping[str, bool], cases: str
) -> tuple[Shown, list[str]]:
    """What the tests showed, and what is wrong with it.

    Args:
        found: what tests/matrix/conftest.py wrote.
        native: what the untouched release has by itself.
    """
    cells: dict[str, str] = {}
    reasons: dict[str, str] = {}
    problems: list[str] = []
    for name in CAPABILITIES[product]:
        tests = found.get("capabilities", {}).get(name, {"passed": 0, "failed": [], "skipped": []})
        problems += [f"{test} ({name})" for test in tests["failed"]]
        if tests["failed"]:
            cells[name] = FAILS
        elif tests["passed"]:
            cells[name] = NATIVE if native[name] else SHIMMED
        elif tests["skipped"] and not native[name]:
            cells[name], reasons[name] = MISSING, tests["skipped"][0]
        else:
            cells[name] = FAILS
            problems.append(
                f"no test showed {name}, {'which is native' if native[name] else 'none was there'}"
            )
    counts = found.get("tests", {})
    shown = Shown(
        python=found.get("python", ""),
        torch=found.get("torch", ""),
        cases=cases,
        passed=counts.get("passed", 0),
        skipped=counts.get("skipped", 0),
        day=date.today().isoformat(),
        cells=cells,
        reasons=reasons,
    )
    return shown, problems


def stale(outcome: Outcome, known: Mapping[str, Shown]) -> list[str]:
    """Where docs/dev/matrix.md says something else than what was run."""
    name, shown = outcome.release.name, outcome.shown
    if name not in known:
        return [f"docs/dev/matrix.md has no column for it: {STALE}"]
    said = known[name].cells
    return [
        f"{capability} is {cell}, and docs/dev/matrix.md says {said.get(capability, 'nothing')}: {STALE}"
        for capability, cell in shown.cells.items()
        if said.get(capability) != cell
    ]


def run_all(releases: Sequence[matrix.Release], every_case: bool) -> Iterator[Outcome]:
    """Run them side by side, one process a core, and say on stderr how it goes; each as it is done."""
    hands = {release.name: str(hand) for hand, release in enumerate(matrix.read().releases)}
    LOGS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(_cores()) as pool:
        jobs = [pool.submit(run, one, "all" if every_case else hands[one.name]) for one in releases]
        for done, job in enumerate(as_completed(jobs), 1):
            outcome = job.result()
            told = "\n".join(filter(None, [outcome.line(), outcome.said]))
            print(f"[{done}/{len(jobs)}] {told}", file=sys.stderr, flush=True)
            yield outcome


def _cores() -> int:
    if workers := os.environ.get("NPU_REPLAY_WORKERS"):
        return int(workers)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(arguments: Sequence[str]) -> int:
    """Run, write or check the page, and return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true", help="every case on every release")
    parser.add_argument("--check", action="store_true", help="compare with the page, and write nothing")
    asked = parser.parse_args(arguments)
    known = matrix_page.read()
    problems: list[str] = []
    for outcome in run_all(matrix.read().of(asked.names), asked.all):
        name = outcome.release.name
        problems += [f"{name}: {problem}" for problem in outcome.problems]
        if asked.check:
            problems += [f"{name}: {line}" for line in stale(outcome, known)]
        else:
            outcome.shown.write(name)
            matrix_page.write()
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
