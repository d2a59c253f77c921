"""docs/grpo.md and docs/dev/tried.md: what they say of the published runs is what the files show."""

from __future__ import annotations

import importlib
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [(ROOT / "docs" / "grpo.md", ["bfloat16"]), (ROOT / "docs" / "dev" / "tried.md", ["coarse", "fsdp"])]
SHOWN = [(page, name) for page, names in PAGES for name in names]


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "docs" / "grpo" / f"{name}.json").read_text())
    return found


def rows(name: str, arm: str, first: int = 0) -> list[dict[str, Any]]:
    return [
        row
        for run in result(name)["runs"]
        for row in run["rows"]
        if run["arm"] == arm and row["step"] >= first
    ]


def words(page: Path) -> str:
    return " ".join(page.read_text(encoding="utf-8").split())


@pytest.mark.parametrize(("page", "name"), SHOWN, ids=[name for _, name in SHOWN])
def test_a_table_is_what_the_example_prints_of_its_file(
    page: Path,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "grpo"))
    monkeypatch.setenv("COLUMNS", "200")
    importlib.import_module("curves").show(result(name))
    tables = re.findall(r"```text\n(.*?)\n```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert capsys.readouterr().out.strip("\n") in tables


@pytest.mark.parametrize(("page", "name"), SHOWN, ids=[name for _, name in SHOWN])
def test_a_file_shows_what_a_run_has_to_and_its_page_how_it_ran(
    page: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "ci"))
    found = result(name)
    assert importlib.import_module("check").grpo(found) == []
    command = found["command"].replace("python examples/grpo/run.py", "bash ci/grpo.sh")
    assert command in words(page) or found["command"] in words(page)
    assert f"{found['seconds']:,} s beside other work" in words(page)
    assert f"commit {found['versions']['commit'][:7]}" in words(page)


def test_the_words_beside_the_table_are_true_of_the_file() -> None:
    said = words(ROOT / "docs" / "grpo.md")
    off = {
        arm: sum(round(one["extreme_frac_tau2"] * one["tokens"]) for one in rows("bfloat16", arm))
        for arm in ARMS
    }
    tokens = {arm: sum(one["tokens"] for one in rows("bfloat16", arm)) for arm in ARMS}
    assert (
        f"from {off['none']} of {tokens['none']:,} to {off['R3']} of {tokens['R3']:,}, all five in step 1"
        in said
    )
    assert {one["step"] for one in rows("bfloat16", "R3") if one["extreme_frac_tau2"]} == {1}
    kl = {arm: mean(rows("bfloat16", arm, 8), "rollout_train_k3_kl") for arm in ARMS}
    assert f"{kl['R3']:.1e} against {kl['none']:.1e}".replace("e-0", "e-") in said
    assert all(one["router_mismatch"] == one["update_mismatch"] for one in rows("bfloat16", "R2"))
    first = [run["rows"][0]["reward"] for run in result("bfloat16")["runs"]]
    assert f"{min(first):.0%} to {max(first):.0%}".replace("%", "", 1).replace("%", " %") in said
    parts = [mean(EVERY, f"seconds, {part}") for part in ("rollout", "old log-probs", "update", "weights")]
    told = "{:.1f} s for the rollout, {:.1f} for old log-probs, {:.1f} for updates, {:.1f} for weights"
    assert told.format(*parts) in said


ARMS = ("none", "R3")
EVERY = [row for run in result("bfloat16")["runs"] for row in run["rows"]]


def mean(of: list[dict[str, Any]], name: str) -> float:
    return statistics.fmean(row[name] for row in of)
