"""The matrix: what its list and its cells mean, which cases are dealt, and that the page is whole."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jobs
from capabilities import CAPABILITIES
from dealt_cases import SHARES, dealt
from zoo.gpt import ALL_RECOMPUTE, VARIANTS

ROOT = Path(__file__).parents[2]
CI = ROOT / "ci"


@pytest.fixture(scope="module")
def runs() -> Iterator[Any]:
    """ci/matrix_run.py, which imports its neighbours by name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(CI))
        yield importlib.import_module("matrix_run")


@pytest.fixture(scope="module")
def matrix(runs: Any) -> Any:
    return runs.matrix


# The list of releases


def test_the_list_has_every_line_of_megatron_core_and_both_of_transformers(matrix: Any) -> None:
    releases = matrix.read().releases
    minors = {int(one.version.split(".")[1]) for one in releases if one.product == "megatron"}
    assert minors >= set(range(12, 20))
    assert minors == set(range(12, max(minors) + 1))
    majors = {release.version.split(".")[0] for release in releases if release.product == "transformers"}
    assert majors == {"4", "5"}
    versions = [tuple(map(int, release.version.split("."))) for release in releases[:-2]]
    assert versions == sorted(set(versions))


def test_what_is_newer_than_python_3_11_is_forced(matrix: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix.platform, "python_version", lambda: "3.11.7")
    read = matrix.read()
    forced = {release.version for release in read.releases if release.is_forced_onto("3.11.7")}
    assert forced == {
        release.version
        for release in read.releases
        if release.product == "megatron" and release.version >= "0.17"
    }
    assert read.one("megatron", "0.17.0").pip_arguments() == [
        "--no-deps",
        "--ignore-requires-python",
        "--python-version",
        "3.12",
        "--only-binary=:all:",
        "megatron-core==0.17.0",
    ]
    assert read.one("megatron", "0.12.1").pip_arguments() == ["--no-deps", "megatron-core==0.12.1"]
    monkeypatch.setattr(matrix.platform, "python_version", lambda: "3.12.1")
    assert read.one("megatron", "0.17.0").pip_arguments() == ["--no-deps", "megatron-core==0.17.0"]


def test_a_release_goes_by_two_names_and_none_means_all(
    matrix: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    read = matrix.read()
    for name in ("0.15.3", "megatron-0.15.3"):
        assert [release.name for release in read.of([name])] == ["megatron-0.15.3"]
    assert [one.version for one in read.of(["5.24.0", "0.16.1", "0.12.0"])] == ["0.12.0", "0.16.1", "5.24.0"]
    assert read.of([]) == list(read.releases)
    assert matrix.main(["names", "0.15.3", "0.99.1"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("ci/matrix.toml has no 0.99.1. It has megatron-0.12.0, ")


def test_a_new_release_is_one_line(matrix: Any, tmp_path: Path) -> None:
    text = matrix.TOML.read_text()
    line = '"0.19.2" = { python = "3.12", beside = ["triton==3.9.0"] }\n'
    path = tmp_path / "matrix.toml"
    path.write_text(text.replace(line, line + line.replace("0.19.2", "0.99.0")))
    known = {release.name for release in matrix.read().releases}
    assert {release.name for release in matrix.read(path).releases} - known == {"megatron-0.99.0"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ('[megatron-core]\n"0.12.1" = { pyton = "3.12" }', "pyton isn't known"),
        ('[tiers]\ntests = ["0.12.2"]\n[megatron-core]\n"0.12.1" = {}', "has no 0.12.2"),
    ],
)
def test_a_slip_in_the_file_is_an_error(matrix: Any, tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "matrix.toml"
    path.write_text(lines)
    with pytest.raises(ValueError, match=message):
        matrix.read(path)


def test_the_scripts_ask_for_their_releases(matrix: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["tier", "tests"]) == 0
    assert capsys.readouterr().out.split() == ["0.12.1", "0.16.1"]
    assert matrix.main(["beside", "megatron", "0.18.0"]) == 0
    assert capsys.readouterr().out.split() == ["triton==3.9.0"]
    assert "matrix.py" in (CI / "environment.sh").read_text()


# The choice of cases

FIRST = list(range(15))
SECOND = "abcdefghijklmn"
THIRD = "wxyz"


def hands(count: int, first: int = 0) -> list[list[tuple[Any, Any, Any]]]:
    return [dealt(FIRST, SECOND, THIRD, str(first + number)) for number in range(count)]


@pytest.mark.parametrize("start", [0, SHARES * len(SECOND)])
def test_hands_that_follow_each_other_hold_every_pair_once(start: int) -> None:
    pairs = [case[:2] for hand in hands(SHARES * len(SECOND), start) for case in hand]
    assert sorted(pairs) == sorted(itertools.product(FIRST, SECOND))


def test_so_many_hands_as_there_are_shares_have_every_variant() -> None:
    every = hands(SHARES * len(SECOND))
    for number, hand in enumerate(every):
        assert len({case[1] for case in hand}) == len({case[2] for case in hand}) == len(hand) in (1, 2)
        following = itertools.chain(*every[number : number + SHARES])
        assert {case[0] for case in following} == set(FIRST) or number + SHARES > len(every)


def test_a_short_axis_has_one_value_in_each_hand() -> None:
    assert [dealt("abc", "xy", [None], str(hand)) for hand in range(3)] == [
        [("a", "x", None)],
        [("b", "y", None)],
        [("c", "x", None)],
    ]


def test_the_releases_together_hold_every_value_and_no_case_twice(matrix: Any) -> None:
    """All triples where there are enough releases."""
    count = sum(release.product == "megatron" for release in matrix.read().releases)
    triples = list(itertools.chain(*hands(count)))
    assert len(set(triples)) == len(triples) >= 2 * len(FIRST)
    assert [set(values) for values in zip(*triples, strict=True)] == [set(FIRST), set(SECOND), set(THIRD)]
    turns = set(itertools.chain(*hands(SHARES * len(SECOND) * len(THIRD))))
    assert turns == set(dealt(FIRST, SECOND, THIRD, "all"))


# What a cell says


def ran(passed: int = 0, failed: int = 0, skipped: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"passed": passed, "failed": ["a test"] * failed, "skipped": list(skipped)}


@pytest.mark.parametrize(
    ("tests", "native", "cell", "problem"),
    [
        (ran(passed=3), True, "native", ""),
        (ran(passed=3), False, "shimmed", ""),
        (ran(passed=3, skipped=("a case",)), False, "shimmed", ""),
        (ran(skipped=("the release can't",) * 2), False, "missing", ""),
        (ran(passed=3, failed=1), True, "FAILS", "a test (mixtral)"),
        (ran(skipped=("the release can't",)), True, "FAILS", "no test showed mixtral, which is native"),
        (ran(), False, "FAILS", "no test showed mixtral, none was there"),
    ],
)
def test_a_cell_is_what_the_tests_and_the_untouched_release_say(
    runs: Any, tests: dict[str, Any], native: bool, cell: str, problem: str
) -> None:
    found = {"capabilities": dict.fromkeys(CAPABILITIES["transformers"], ran(passed=1)) | {"mixtral": tests}}
    natives = dict.fromkeys(CAPABILITIES["transformers"], False) | {"mixtral": native}
    shown, problems = runs.judge("transformers", found, natives, "all")
    assert shown.cells["mixtral"] == cell
    assert problems == ([problem] if problem else [])
    assert shown.reasons == ({"mixtral": "the release can't"} if cell == "missing" else {})
    assert {cell for name, cell in shown.cells.items() if name != "mixtral"} == {"shimmed"}


def shown(runs: Any, **changes: Any) -> Any:
    cells = dict.fromkeys(CAPABILITIES["megatron"], "shimmed") | changes.pop("cells", {})
    return runs.Shown("3.11.7", "2.13.0", "all", 9, 1, "2026-11-22", cells=cells, **changes)


@pytest.mark.parametrize(
    ("ran_on", "status", "problem"),
    [
        ("0.15.3", 0, ""),
        ("0.16.1", 0, "what ran was megatron-core 0.16.1"),
        (None, 4, "pytest ended with 4 and left no result, see matrix/megatron-0.15.3.log"),
        (None, 0, "pytest ended with 0 and left no result, see matrix/megatron-0.15.3.log"),
    ],
)
def test_another_release_than_was_asked_for_is_a_problem_and_so_is_none(
    runs: Any,
    matrix: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    ran_on: str | None,
    status: int,
    problem: str,
) -> None:
    def start(target: str, task: dict[str, Any], **given: Any) -> Any:
        (folder,) = given["path"]
        assert str(folder).endswith("megatron/0.15.3")
        if target == "megatron_snapshot:with_npu_replay":
            return [jobs.Ended("", 0, {"native": dict.fromkeys(rows, False)}, "")]
        if ran_on is not None:
            found = {"megatron-core": ran_on, "capabilities": dict.fromkeys(rows, ran(passed=1))}
            Path(given["env"]["NPU_REPLAY_MATRIX_RESULT"]).write_text(json.dumps(found))
        return [jobs.Ended("", 0, status, "".join(f"line {number}\n" for number in range(1, 101)))]

    rows = CAPABILITIES["megatron"]
    (tmp_path / "matrix").mkdir()
    monkeypatch.setattr(runs, "LOGS", tmp_path / "matrix")
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    monkeypatch.setattr(jobs, "start", start)
    outcome = runs.run(matrix.read().one("megatron", "0.15.3"), "0")
    assert outcome.problems == ((problem,) if problem else ())
    assert outcome.said.split("\n")[-2:] == (
        ["    line 99", "    line 100"] if status or ran_on is None else [""]
    )


def test_a_page_that_says_something_else_is_stale(runs: Any, matrix: Any) -> None:
    release = matrix.read().one("megatron", "0.15.3")
    outcome = runs.Outcome(release, shown(runs), (), 1.0)
    assert runs.stale(outcome, {release.name: shown(runs, reasons={})}) == []
    (line,) = runs.stale(outcome, {release.name: shown(runs, cells={"flag": "native"})})
    assert line.startswith("flag is shimmed, and docs/dev/matrix.md says native: run bash ci/matrix.sh --all")
    (line,) = runs.stale(outcome, {})
    assert "no column" in line


def test_the_end_of_what_a_failed_release_printed_is_shown(
    runs: Any, matrix: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    release = matrix.read().one("megatron", "0.15.3")
    said = "    E   ModuleNotFoundError: No module named 'requests'"
    monkeypatch.setattr(runs, "run", lambda *_: runs.Outcome(release, shown(runs), ("a problem",), 2.0, said))
    assert [outcome.release for outcome in runs.run_all([release], False)] == [release]
    counts = "9 passed, 1 not for this release"
    assert capsys.readouterr().err == f"[1/1] megatron-0.15.3: 1 PROBLEMS, {counts}, 2 s\n{said}\n"


def test_a_release_whose_test_fails_makes_the_run_fail(
    runs: Any, matrix: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = {"megatron-0.15.3": shown(runs), "megatron-0.16.1": shown(runs)}
    monkeypatch.setattr(runs, "read", lambda: known)
    bad = "megatron-0.16.1"

    def run(release: Any, cases: str) -> Any:
        return runs.Outcome(release, shown(runs), ("tests/x.py::y (flag)",) * (release.name == bad), 1.0)

    monkeypatch.setattr(runs, "run", run)
    assert runs.main(["--check", "0.15.3"]) == 0
    assert runs.main(["--check", "0.15.3", "0.16.1"]) == 1
    assert capsys.readouterr().out == "megatron-0.16.1: tests/x.py::y (flag)\n"


# The page


def test_the_numbers_of_cases_on_the_page_are_those_of_the_tests() -> None:
    rows = CAPABILITIES["megatron"]
    assert ("fifteen ways" in rows["blocks"].says, len(VARIANTS)) == (True, 15)
    assert ("thirteen ways" in rows["recompute"].says, len(ALL_RECOMPUTE)) == (True, 13)


def cells(text: str) -> list[list[str]]:
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]


def test_neighbours_that_agree_share_a_column_and_reasons_are_notes(runs: Any, matrix: Any) -> None:
    read = matrix.read()
    releases = [
        read.one("megatron", version) for version in ("0.15.2", "0.15.3", "0.16.1", "0.17.0", "0.17.1")
    ]
    lacks = {"cells": {"flag": "missing"}, "reasons": {"flag": "this release has none"}}
    known = {release.name: shown(runs) for release in releases} | {"megatron-0.16.1": shown(runs, **lacks)}
    head, _, *rows = cells(runs.capabilities(releases, known))
    assert head == ["", "0.15.2 to 0.15.3", "0.16.1", "0.17.0 to 0.17.1 (1)"]
    row = next(row for row in rows if row[0] == CAPABILITIES["megatron"]["flag"].says)
    assert row[1:] == ["shimmed", "missing (2)", "shimmed"]
    text = runs.tables(releases, known)
    assert "1. It says that it needs Python 3.12, and was forced onto 3.11." in text
    assert "2. This release has none." in text
    assert sum(row[0].startswith("megatron-core") for row in cells(text)) == 5


def test_the_page_is_made_of_the_results_beside_it(runs: Any, matrix: Any, tmp_path: Path) -> None:
    """And is nothing that a hand has changed; a result that is written anew is the same file."""
    text = runs.PAGE.read_text(encoding="utf-8")
    known = runs.read()
    assert text == runs.pages.rewritten(text, runs.MARKS, runs.tables(matrix.read().releases, known))
    assert known.keys() == {release.name for release in matrix.read().releases}
    for release in matrix.read().releases:
        one = known[release.name]
        assert one.cells.keys() == CAPABILITIES[release.product].keys()
        assert set(one.cells.values()) <= {"native", "shimmed", "missing"}
        one.write(release.name, tmp_path)
        file = f"{release.name}.json"
        assert (tmp_path / file).read_bytes() == (runs.FOLDER / file).read_bytes()
    assert runs.read(tmp_path) == known
