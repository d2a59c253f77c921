"""Runs tests/matrix/ on releases that are fetched, in a process each, and says what each was shown to have.

    python ci/matrix_run.py [--all] [--check] [NAME ...]     # ci/matrix.sh fetches, and calls it

With --check, releases that are the same code share a run, unless it is of every case.

What a test shows is told by its mark; what the release has by itself, by a process that has not imported
npu_replay yet (tests/megatron_snapshot.py). What came of it goes to docs/dev/matrix/, and docs/dev/matrix.md
is made of that, never by hand. Exit status 1: a test failed, or with --check the page says something else.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import Any

import pages

import matrix

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import jobs  # noqa: E402  it lies among the tests, as the capabilities do that they are marked with
from capabilities import CAPABILITIES  # noqa: E402
from dealt_cases import import_orders  # noqa: E402

LOGS = ROOT / ".work" / "matrix"
PAGE = ROOT / "docs" / "dev" / "matrix.md"
FOLDER = ROOT / "docs" / "dev" / "matrix"
MARKS = "<!-- matrix: written by ci/matrix.sh -->", "<!-- end of matrix -->"
TRANSFORMERS_TESTS = "tests/matrix/test_transformers.py"
NATIVE = "native"
SHIMMED = "shimmed"
MISSING = "missing"
FAILS = "FAILS"
ELSEWHERE = ("package_info.py", "dist_checkpointing/", "distributed/fsdp/", "quantization/")
"""Files of megatron/core in which releases that share a run may differ: the version, and what no test of the
matrix runs."""
STALE = "run bash ci/matrix.sh --all and commit docs/dev/matrix.md with docs/dev/matrix/"


@dataclass(frozen=True)
class Shown:
    """What a run showed of one release.

    Attributes:
        cases: `all`, or `a choice`.
        cells: capability to native, shimmed, missing or FAILS.
        reasons: why one is missing, as its tests said when they were skipped.
    """

    python: str
    torch: str
    cases: str
    passed: int
    skipped: int
    day: str
    cells: Mapping[str, str]
    reasons: Mapping[str, str] = field(default_factory=dict)

    def write(self, name: str, folder: Path = FOLDER) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        (folder / f"{name}.json").write_text(f"{text}\n", encoding="utf-8")


@dataclass(frozen=True)
class Outcome:
    """What came of one release.

    Attributes:
        problems: one line each: a test that failed, a capability that nothing shows.
        said: the end of what its tests printed, where one failed: the log may lie where nobody can look.
    """

    release: matrix.Release
    shown: Shown
    problems: tuple[str, ...]
    seconds: float
    said: str = ""


def run(release: matrix.Release, cases: str) -> Outcome:
    """Run the tests on one release.

    Args:
        cases: `all`, or the number of a hand (tests/dealt_cases.py).
    """
    started = time.monotonic()
    log = LOGS / f"{release.name}.log"
    result = LOGS / f"{release.name}.json"
    for earlier in LOGS.glob(f"{release.name}.*json"):
        earlier.unlink()
    snapshots: dict[str, Any] = {}
    folder = ROOT / ".work" / release.product / release.version

    def process(target: str, task: Mapping[str, Any], environment: Mapping[str, str]) -> jobs.Ended:
        """One of tests/jobs.py, with the release on its path."""
        return jobs.start(target, task, path=[folder], env=environment, timeout=3600)[0]

    for came in import_orders(cases) if release.product == "megatron" else ():
        # Here, and not in test_report.py, whose process would start a server of its own to fork from.
        ended = process("megatron_snapshot:with_npu_replay", {"came": came}, {})
        snapshots[came] = ended.answer or {}
        if ended.answer:
            result.with_suffix(f".{came}.json").write_text(json.dumps(ended.answer), encoding="utf-8")
    select = ["tests/matrix", "--ignore", TRANSFORMERS_TESTS]
    arguments = ["-q", "-rsfE", "-p", "no:cacheprovider"]
    arguments += select if release.product == "megatron" else [TRANSFORMERS_TESTS]
    environment = {"NPU_REPLAY_MATRIX_RESULT": str(result), "NPU_REPLAY_MATRIX_CASES": cases}
    ended = process("jobs:tests", {"arguments": arguments}, environment)
    status = ended.code or ended.answer
    log.write_text(ended.output, encoding="utf-8")
    report = json.loads(result.read_text(encoding="utf-8")) if result.exists() else {}
    # Where it failed its tests fail too, and say why. Of transformers nothing is native.
    native = snapshots.get("last", {}).get("native") or dict.fromkeys(CAPABILITIES[release.product], False)
    shown, problems = judge(release.product, report, native, "all" if cases == "all" else "a choice")
    if report and report.get(release.package) != release.version:
        problems = [f"what ran was {release.package} {report.get(release.package)}"]
    if not report or (status and not problems):
        unsaid = "" if report else " and left no result"
        problems = [f"pytest ended with {status}{unsaid}, see {log.relative_to(ROOT)}"]
    lines = ended.output.splitlines()[-30:] if status or not report else []
    output = "\n".join(f"    {line}" for line in lines)
    return Outcome(release, shown, tuple(problems), time.monotonic() - started, output)


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
            cells[name] = MISSING
            reasons[name] = tests["skipped"][0]
        else:
            cells[name] = FAILS
            why = "which is native" if native[name] else "none was there"
            problems.append(f"no test showed {name}, {why}")
    counts = found.get("tests", {})
    passed = counts.get("passed", 0)
    skipped = counts.get("skipped", 0)
    on = found.get("python", ""), found.get("torch", "")
    return Shown(*on, cases, passed, skipped, date.today().isoformat(), cells, reasons), problems


def stale(outcome: Outcome, known: Mapping[str, Shown]) -> list[str]:
    """Where docs/dev/matrix.md says something else than what was run."""
    if outcome.release.name not in known:
        return [f"docs/dev/matrix.md has no column for it: {STALE}"]
    cells = known[outcome.release.name].cells
    return [
        f"{capability} is {cell}, and docs/dev/matrix.md says {cells.get(capability, 'nothing')}: {STALE}"
        for capability, cell in outcome.shown.cells.items()
        if cells.get(capability) != cell
    ]


def code_of(release: matrix.Release) -> tuple[object, ...]:
    """Return what tells its code from that of other releases; one that isn't fetched is like no other."""
    core = ROOT / ".work" / release.product / release.version / "megatron" / "core"
    digest = hashlib.sha256()
    files = {str(file.relative_to(core)): file for file in core.rglob("*.py")}
    for name in sorted(files):
        if not name.startswith(ELSEWHERE):
            digest.update(f"{name} {hashlib.sha256(files[name].read_bytes()).hexdigest()}\n".encode())
    return digest.digest() if files else release.name, release.python, release.beside


def sharing(releases: Sequence[matrix.Release]) -> list[list[matrix.Release]]:
    """Put releases together of which one shows what all do."""
    groups: dict[object, list[matrix.Release]] = {}
    for release in releases:
        groups.setdefault(code_of(release), []).append(release)
    return [*groups.values()]


def run_all(asked: Sequence[matrix.Release], every_case: bool, share: bool) -> Iterator[Outcome]:
    """Run them side by side, one process a core, and say on stderr how it goes; each as it is done."""
    releases = matrix.read().releases
    groups = sharing(releases) if share else [[release] for release in releases]
    LOGS.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(int(os.environ.get("NPU_REPLAY_WORKERS") or cores)) as pool:
        running = {}
        for hand, group in enumerate(groups):
            if same := [release for release in group if release in asked]:
                job = pool.submit(run, same[-1], "all" if every_case else str(hand))
                running[job] = same
        for done, job in enumerate(as_completed(running), 1):
            outcome = job.result()
            names = ", ".join(release.name for release in running[job])
            verdict = f"{len(outcome.problems)} PROBLEMS" if outcome.problems else "ok"
            counts = f"{outcome.shown.passed} passed, {outcome.shown.skipped} not for this release"
            line = f"[{done}/{len(running)}] {names}: {verdict}, {counts}, {outcome.seconds:.0f} s"
            print(*filter(None, [line, outcome.said]), sep="\n", file=sys.stderr, flush=True)
            for release in running[job]:
                yield replace(outcome, release=release)


# The page


def read(folder: Path = FOLDER) -> dict[str, Shown]:
    """What is known, by the name of the release."""
    return {path.stem: Shown(**json.loads(path.read_text("utf-8"))) for path in folder.glob("*.json")}


def tables(releases: Sequence[matrix.Release], known: Mapping[str, Shown]) -> str:
    """What stands between the marks: what the releases of each product have, and what they were run with."""
    known_here = [release for release in releases if release.name in known]
    parts: list[str] = []
    for package, group in groupby(known_here, key=lambda release: release.package):
        parts += [f"### {package}", capabilities(list(group), known)]
    titles = ["", "Python", "torch", "cases", "tests passed", "not for this release", "day"]
    rows = []
    for release in known_here:
        shown = known[release.name]
        counts = [str(shown.passed), str(shown.skipped)]
        name = f"{release.package} {release.version}"
        rows.append([name, shown.python, shown.torch, shown.cases, *counts, shown.day])
    return "\n\n".join([*parts, "### What each was run with", pages.table(titles, rows)])


def capabilities(releases: Sequence[matrix.Release], known: Mapping[str, Shown]) -> str:
    """A row a capability. Neighbours of which all is the same share a column."""
    notes: list[str] = []

    def noted(cell: str, why: str | None) -> str:
        """The cell with the number of its note, if it has one."""
        if not why:
            return cell
        if why not in notes:
            notes.append(why)
        return f"{cell} ({notes.index(why) + 1})"

    def says(release: matrix.Release) -> tuple[object, ...]:
        return known[release.name].cells, known[release.name].reasons

    columns = [list(same) for _, same in groupby(releases, key=says)]
    ends = [dict.fromkeys([column[0].version, column[-1].version]) for column in columns]
    titles = ["", *map(" to ".join, ends)]
    rows = []
    for name, capability in CAPABILITIES[releases[0].product].items():
        of_each = [known[column[0].name] for column in columns]
        cells = [noted(shown.cells.get(name, "not run"), shown.reasons.get(name)) for shown in of_each]
        rows.append([capability.says, *cells])
    footnotes = [
        f"{number}. {text[0].upper()}{text[1:].rstrip('.')}." for number, text in enumerate(notes, 1)
    ]
    return "\n".join([pages.table(titles, rows), "", *footnotes]).rstrip()


def main(arguments: Sequence[str]) -> int:
    """Run, write or check the page, and return the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--all", action="store_true", help="every case on every release")
    parser.add_argument("--check", action="store_true", help="compare with the page, and write nothing")
    asked = parser.parse_args(arguments)
    known = read()
    problems: list[str] = []
    share = asked.check and not asked.all
    for outcome in run_all(matrix.read().of(asked.names), asked.all, share):
        name = outcome.release.name
        problems += [f"{name}: {problem}" for problem in outcome.problems]
        if asked.check:
            problems += [f"{name}: {line}" for line in stale(outcome, known)]
        else:
            outcome.shown.write(name)
            pages.rewrite(PAGE, MARKS, tables(matrix.read().releases, read()))
    print(*problems, sep="\n", end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
