"""The matrix: what its list and its cells mean, and that the page is whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from capabilities import CAPABILITIES
from ci_module import ci_module
from dealt_cases import dealt, import_orders

runs = ci_module("matrix_run")
matrix = runs.matrix


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
    tests: dict[str, Any], native: bool, cell: str, problem: str
) -> None:
    report = {"capabilities": dict.fromkeys(CAPABILITIES["transformers"], ran(passed=1)) | {"mixtral": tests}}
    natives = dict.fromkeys(CAPABILITIES["transformers"], False) | {"mixtral": native}
    shown, problems = runs.judge("transformers", report, natives, "all")
    assert shown.cells["mixtral"] == cell
    assert problems == ([problem] if problem else [])
    assert shown.reasons == ({"mixtral": "the release can't"} if cell == "missing" else {})
    assert {cell for name, cell in shown.cells.items() if name != "mixtral"} == {"shimmed"}


SHOWN = runs.Shown(
    *("3.11.7", "2.13.0", "all", 9, 1, "2026-11-22"),
    cells=dict.fromkeys(CAPABILITIES["megatron"], "shimmed"),
)


@pytest.fixture
def hands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The hand of cases that each run had; the runs of 0.16.1 fail."""
    hands: list[str] = []

    def run(release: Any, cases: str) -> Any:
        hands.append(cases)
        failed = ("tests/x.py::y (flag)",) * (release.name == "megatron-0.16.1")
        return runs.Outcome(release, SHOWN, failed, 1.0)

    monkeypatch.setattr(runs, "run", run)
    monkeypatch.setattr(runs, "read", lambda: {"megatron-0.15.3": SHOWN, "megatron-0.16.1": SHOWN})
    monkeypatch.setattr(runs.Shown, "write", lambda *_: None)
    monkeypatch.setattr(runs.pages, "rewrite", lambda *_: None)
    return hands


@pytest.mark.parametrize(
    ("arguments", "is_same_code", "count", "failed"),
    [
        (["--check", "0.15.3"], False, 1, []),
        (["--check", "0.15.3", "0.16.1"], False, 2, ["0.16.1"]),
        (["--check", "0.15.3", "0.16.1"], True, 1, ["0.15.3", "0.16.1"]),  # one run stands for both
        (["--all", "--check", "0.15.3", "0.16.1"], True, 2, ["0.16.1"]),
        (["0.15.3", "0.16.1"], True, 2, ["0.16.1"]),
    ],
)
def test_a_release_whose_test_fails_makes_the_run_fail(
    hands: list[str],
    arguments: list[str],
    is_same_code: bool,
    count: int,
    failed: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if is_same_code:
        monkeypatch.setattr(runs, "code_of", lambda release: release.product)
    assert runs.main(arguments) == int(bool(failed))
    assert capsys.readouterr().out == "".join(f"megatron-{name}: tests/x.py::y (flag)\n" for name in failed)
    assert len(hands) == count
    assert len({*hands}) == (1 if "--all" in arguments else count), "each has cases of its own"


def test_a_process_has_the_cases_of_its_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that had imported the choice before it was told: a child of ci/matrix_run.py has."""
    axes = range(8), range(3), range(2)
    monkeypatch.setenv("NPU_REPLAY_MATRIX_CASES", "1")
    assert (dealt(*axes), import_orders()) == (dealt(*axes, hand="1"), ["last"])
    assert dealt(*axes) != dealt(*axes, hand="0")


@pytest.mark.usefixtures("hands")
def test_a_cell_that_is_another_than_the_page_has_makes_the_check_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = replace(SHOWN, cells=SHOWN.cells | {"flag": "native"})
    monkeypatch.setattr(runs, "read", lambda: {"megatron-0.15.3": other})
    assert runs.main(["--check", "0.15.3"]) == 1
    assert "megatron-0.15.3: " in capsys.readouterr().out


def test_releases_share_a_run_where_their_code_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "ROOT", tmp_path)
    releases = {release.name: release for release in matrix.read().releases}

    def share(*names: str) -> bool:
        return len(runs.sharing([releases[name] for name in names])) == 1

    assert not share("megatron-0.15.0", "megatron-0.15.1"), "neither is there"
    for version in ("0.15.0", "0.15.1", "0.18.0"):
        core = tmp_path / ".work" / "megatron" / version / "megatron" / "core"
        for name, text in {
            "package_info.py": version,
            "transformer/moe/router.py": "",
            "dist_checkpointing/x.py": version,
            "distributed/fsdp/x.py": version,
            "quantization/x.py": version,
        }.items():
            (core / name).parent.mkdir(parents=True, exist_ok=True)
            (core / name).write_text(text)
    assert share("megatron-0.15.0", "megatron-0.15.1")
    assert not share("megatron-0.15.1", "megatron-0.18.0"), "they lie beside other packages"
    router = tmp_path / ".work/megatron/0.15.1/megatron/core/transformer/moe/router.py"
    router.write_text("another")
    assert not share("megatron-0.15.0", "megatron-0.15.1")
    router.unlink()
    assert not share("megatron-0.15.0", "megatron-0.15.1")


# The page


def test_the_page_is_made_of_the_results_beside_it(tmp_path: Path) -> None:
    """And is nothing that a hand has changed; a result that is written anew is the same file."""
    text = runs.PAGE.read_text(encoding="utf-8")
    known = runs.read()
    assert text == runs.pages.rewritten(text, runs.MARKS, runs.tables(matrix.read().releases, known))
    assert known.keys() == {release.name for release in matrix.read().releases}
    for release in matrix.read().releases:
        shown = known[release.name]
        assert shown.cells.keys() == CAPABILITIES[release.product].keys()
        assert set(shown.cells.values()) <= {"native", "shimmed", "missing"}
        shown.write(release.name, tmp_path)
        file = f"{release.name}.json"
        assert (tmp_path / file).read_bytes() == (runs.FOLDER / file).read_bytes()
    assert runs.read(tmp_path) == known
