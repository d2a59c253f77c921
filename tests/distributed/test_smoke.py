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


def tried(report: dict[str, Any]) -> set[tuple[str, str]]:
    """Each feature with its results."""
    return {(one["feature"], one["result"]) for one in report["results"]}


def job(target: str, ranks: int, task: dict[str, Any] | None = None, folder: Path | None = None) -> list[jobs.Ended]:
    worker = "distributed.smoke_worker"
    return jobs.start(f"{worker}:{target}", task, ranks=ranks, before=f"{worker}:prepare", folder=folder)


def test_four_processes_pass_every_feature(tmp_path: Path) -> None:
    """With every axis of a pipeline: virtual stages, tensor and expert parallel ranks. The other ways of routing
    are tried below, and with recompute in tests/doctor.
    """
    file = tmp_path / "smoke.json"
    arguments = ["--tp", "2", "--pp", "2", "--vp", "2", "--ep", "2", "--recompute", "--out", str(file)]
    ended = job("command", 4, {"arguments": arguments})
    assert [(one.code, one.answer) for one in ended] == [(0, 0)] * 4, ended[0].problem
    report = json.loads(file.read_text())
    assert tried(report) == {(feature, "PASS") for feature in FEATURES}
    assert report["passed"]
    lines = [line[:4] for line in ended[0].output.splitlines() if line[:1].isupper() and line[4:6] == "  "]
    assert lines == ["PASS"] * len(FEATURES)
    assert not any("PASS" in one.output for one in ended[1:]), "only the first rank speaks"
    assert not any("would choose" in one.output for one in ended), "its own random routes are no news"


@pytest.mark.first_release
def test_the_command_as_people_run_it_with_torchrun(tmp_path: Path) -> None:
    """Context parallel; recompute is tried only if asked for. Without torchrun: tests/cli/test_output.py."""
    file = tmp_path / "smoke.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "npu_replay", "smoke", "--device", "cpu", "--cp", "2", "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report = json.loads(file.read_text())
    assert tried(report) == {(one, "PASS") for one in FEATURES if one != "recompute"}
    cases = {one["case"] for one in report["results"] if one["feature"] == "replay"}
    assert cases == {"softmax", "sigmoid+bias", "groups"}
    assert len(report["results"]) == 1 + 3 * len(FEATURES[1:-1])
    assert done.stdout.startswith("npu-replay smoke: 2 processes, cp 2, on cpu")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[jobs.Ended]]:
    """Runs with one break after the other: the folder of their reports, and how both ranks ended."""
    folder = tmp_path_factory.mktemp("broken")
    return folder, job("breaks", 2, folder=folder)


OTHERS = "token-layers show other experts than were replayed"
BREAKS: dict[str, tuple[str, str]] = {  # each break, the feature that fails then, and what it says
    "groups_fail": ("start", "RuntimeError: no such group"),
    "int64_isnt_summed": ("collectives", "all_reduce of int64 over 2 ranks gave"),
    "model_diverges": ("model", "two runs of one step, without npu_replay, are not comparable: a loss"),
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
    report = json.loads(file.read_text())
    feature, why = BREAKS[name]
    *before, last = report["results"]
    assert (last["feature"], last["result"]) == (feature, "FAIL"), last
    assert why in last["why"], last
    assert [(one["feature"], one["result"]) for one in before] == passed_before(feature)
    assert (report["code"], report["passed"]) == (1, False)


def passed_before(feature: str) -> list[tuple[str, str]]:
    return [(one, "PASS") for one in FEATURES[: FEATURES.index(feature)] if one != "recompute"]


@pytest.mark.first_release
def test_a_rank_that_hangs_is_reported_by_another_and_says_where_it_waits(
    broken: tuple[Path, list[jobs.Ended]],
) -> None:
    folder, (waited, hung) = broken
    report = json.loads((folder / "one_rank_hangs.json").read_text())
    assert tried(report) == {*passed_before("replay"), ("replay", "FAIL")}
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
