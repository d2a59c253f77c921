"""npu-replay smoke over several processes: what it has to show, and a FAIL for each thing that can break."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jobs

FEATURES = (
    "start",
    "collectives",
    "model",
    "record",
    "collect",
    "replay",
    "recompute",
    "gradients",
)
pytestmark = [pytest.mark.megatron, pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(400)]


Found = dict[str, Any]
"""A run's JSON, with its exit code and heading."""


def tried(found: dict[str, Any]) -> dict[str, set[str]]:
    """The results of each feature."""
    results: dict[str, set[str]] = {}
    for one in found["results"]:
        results.setdefault(one["feature"], set()).add(one["result"])
    return results


EVERY = {feature: {"PASS"} for feature in FEATURES}
RUNS = {
    # of two ranks, in one job
    "virtual stages": ["--pp", "2", "--vp", "2", "--recompute"],
    "context": ["--cp", "2"],
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Found]:
    folder = tmp_path_factory.mktemp("runs")
    jobs.run_ranks("distributed.smoke_worker:runs", {"runs": RUNS}, 2, folder=folder)
    return {name: json.loads((folder / f"{name}.json").read_text()) for name in RUNS}


@pytest.mark.first_release
def test_four_processes_pass_every_feature(tmp_path: Path) -> None:
    file = tmp_path / "smoke.json"
    arguments = ["--tp", "2", "--pp", "2", "--ep", "2", "--recompute", "--out", str(file)]
    ended = jobs.start("distributed.smoke_worker:command", {"arguments": arguments}, ranks=4)
    assert [(one.code, one.answer) for one in ended] == [(0, 0)] * 4, ended[0].problem
    found = json.loads(file.read_text())
    out = ended[0].output
    assert tried(found) == EVERY
    assert found["passed"]
    lines = [line[:4] for line in out.splitlines() if line[:1].isupper() and line[4:6] == "  "]
    assert lines == ["PASS"] * (1 + 3 * len(FEATURES[1:]))
    assert not any("PASS" in one.output for one in ended[1:]), "only the first rank speaks"
    assert not any("would choose" in one.output for one in ended), "its own random routes are no news"
    cases = {one["case"] for one in found["results"] if one["feature"] == "replay"}
    assert cases == {"softmax", "sigmoid+bias", "groups"}


@pytest.mark.first_release
def test_the_command_as_people_run_it_with_torchrun(tmp_path: Path) -> None:
    """tests/cli/test_output.py runs it without."""
    file = tmp_path / "smoke.json"
    torchrun = ["-m", "torch.distributed.run", "--standalone"]
    command = [
        sys.executable,
        *torchrun,
        "--nproc-per-node=2",
        "-m",
        "npu_replay",
        "smoke",
        "--device",
        "cpu",
    ]
    command += ["--recompute", "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert tried(json.loads(file.read_text())) == EVERY
    assert done.stdout.startswith("npu-replay smoke: 2 processes, on cpu")


def test_virtual_stages_pass(runs: dict[str, Found]) -> None:
    assert tried(runs["virtual stages"]) == EVERY


def test_context_parallelism_passes_and_recompute_is_tried_only_if_asked_for(runs: dict[str, Found]) -> None:
    assert tried(runs["context"]) == {one: {"PASS"} for one in FEATURES if one != "recompute"}


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[jobs.Ended]]:
    """Runs with one break after the other: the folder of their reports, and how both ranks ended."""
    folder = tmp_path_factory.mktemp("broken")
    return folder, jobs.start("distributed.smoke_worker:breaks", ranks=2, folder=folder)


OTHERS = "token-layers show other experts than were replayed"
BREAKS: dict[str, tuple[str, str]] = {  # each break, the feature that fails then, and what it says
    "groups_fail": ("start", "RuntimeError: no such group"),
    "int64_isnt_summed": ("collectives", "all_reduce of int64 over 2 ranks gave"),
    "model_diverges": ("model", "two runs of one step, without npu_replay, are not comparable: a loss"),
    "record_shifts_rows": ("record", "token-layers were recorded otherwise than the untouched step chose"),
    "record_changes_choice": ("record", "token-layers were recorded otherwise than the untouched step chose"),
    "layout_shifts_rows": ("collect", "they aren't the routes of their tokens"),
    "replay_does_nothing": ("replay", OTHERS),
    "one_rank_raises": ("replay", "micro-batch 0, layer 3: made to fail"),
    "recompute_takes_the_next": ("recompute", "gradients with recompute and without are"),
    "nothing_is_recomputed": ("recompute", "calls of routers were not recomputed"),
    "scores_lose_their_gradient": ("gradients", "not comparable: a loss or a gradient is missing"),
    "missing_rows_get_expert_0": ("replay", "show other experts than the router's own choice"),
}


@pytest.mark.first_release
@pytest.mark.parametrize("name", BREAKS)
def test_a_break_fails_what_it_breaks_and_ends_the_run(
    broken: tuple[Path, list[jobs.Ended]], name: str
) -> None:
    folder, ended = broken
    file = folder / f"{name}.json"
    assert file.exists(), ended[0].output
    found = json.loads(file.read_text())
    *before, last = found["results"]
    feature, why = BREAKS[name]
    assert (last["feature"], last["result"]) == (feature, "FAIL"), last
    assert why in last["why"], last
    assert [one["feature"] for one in before] == [
        one for one in FEATURES[: FEATURES.index(feature)] if one != "recompute"
    ]
    assert {one["result"] for one in before} <= {"PASS"}
    assert (found["code"], found["passed"]) == (1, False)


def test_every_feature_is_seen_to_fail() -> None:
    assert {feature for feature, _ in BREAKS.values()} == set(FEATURES)


@pytest.mark.first_release
def test_a_rank_that_hangs_is_reported_by_another_and_says_where_it_waits(
    broken: tuple[Path, list[jobs.Ended]],
) -> None:
    folder, (waited, hung) = broken
    found = json.loads((folder / "one_rank_hangs.json").read_text())
    results = tried(found)
    assert results.pop("replay") == {"FAIL"}
    assert results == {feature: {"PASS"} for feature in FEATURES[: FEATURES.index("replay")]}
    assert "FAIL: replay, in" in waited.output
    assert hung.code == 1
    assert "Timeout (" in hung.output
    assert "in hanging" in hung.output


@pytest.mark.first_release
def test_the_rank_that_failed_speaks_and_not_the_one_that_waited(
    broken: tuple[Path, list[jobs.Ended]],
) -> None:
    folder, (waited, failed) = broken
    found = json.loads((folder / "one_rank_raises.json").read_text())
    assert found["results"][-1]["rank"] == 1
    assert any("_raise" in frame for frame in found["results"][-1]["trace"])
    line = "FAIL  replay        softmax: rank 1: micro-batch 0, layer 3: made to fail"
    assert [line in one.output for one in (waited, failed)] == [False, True]
