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
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path, str]:
    """Runs with one break after the other: the exit code of the last, their reports, and the output."""
    folder = tmp_path_factory.mktemp("broken")
    first, *_ = jobs.start("distributed.smoke_worker:breaks", ranks=2, folder=folder)
    return first.code, folder, first.output


OTHERS = "token-layers show other experts than were replayed"
BREAKS: dict[str, dict[str, str]] = {  # each break, what fails then, and why it says that it does
    "groups_fail": {"start": "RuntimeError: no such group"},
    "int64_isnt_summed": {"collectives": "all_reduce of int64 over 2 ranks gave"},
    "model_diverges": {"model": "two runs of one step, without npu_replay, are not comparable: a loss"}
    | dict.fromkeys(("record", "collect", "gradients"), "not comparable: a loss"),
    "record_shifts_rows": {
        "record": "token-layers were recorded otherwise than npu_replay.observe saw them",
        "collect": "they aren't the routes of their tokens",
    },
    "record_changes_choice": {"record": "token-layers were recorded otherwise than the untouched step chose"},
    "layout_shifts_rows": {"collect": "they aren't the routes of their tokens"},
    "replay_does_nothing": {"replay": OTHERS, "recompute": OTHERS},
    "one_rank_raises": {"replay": "micro-batch 0, layer 3: made to fail"},
    "recompute_takes_the_next": {"recompute": "gradients with recompute and without are"},
    "nothing_is_recomputed": {"recompute": "calls of routers were not recomputed, of"},
    "scores_lose_their_gradient": {
        "record": "a recorded step and an untouched one are not comparable",
        "gradients": "not comparable: a loss or a gradient is missing",
    },
    "missing_rows_get_expert_0": {"replay": "show other experts than the router's own choice"},
}


@pytest.mark.first_release
@pytest.mark.parametrize("name", BREAKS)
def test_a_break_fails_what_it_breaks_and_nothing_else(broken: tuple[int, Path, str], name: str) -> None:
    _, folder, output = broken
    file = folder / f"{name}.json"
    assert file.exists(), output
    found = json.loads(file.read_text())
    failed = {one["feature"]: one["why"] for one in found["results"] if one["result"] == "FAIL"}
    assert failed.keys() == BREAKS[name].keys(), failed
    assert all(why in failed[feature] for feature, why in BREAKS[name].items()), failed
    assert found["code"] == 1
    assert not found["passed"]


def test_every_feature_is_seen_to_fail() -> None:
    assert {feature for failed in BREAKS.values() for feature in failed} == set(FEATURES)


@pytest.mark.first_release
def test_a_rank_that_hangs_ends_the_job_with_a_report(broken: tuple[int, Path, str]) -> None:
    code, folder, output = broken
    assert code == 1
    found = json.loads((folder / "one_rank_hangs.json").read_text())
    results = tried(found)
    assert results.pop("replay") == {"FAIL"}
    assert results == {feature: {"PASS"} for feature in FEATURES[: FEATURES.index("replay")]}
    assert "FAIL: replay, in" in output


@pytest.mark.first_release
def test_the_rank_that_failed_is_heard_and_not_the_one_that_waited(broken: tuple[int, Path, str]) -> None:
    _, folder, output = broken
    found = json.loads((folder / "one_rank_raises.json").read_text())
    failed = [one for one in found["results"] if one["result"] == "FAIL"]
    assert [one["rank"] for one in failed] == [1]
    assert any("_raise" in frame for frame in failed[0]["trace"])
    assert "FAIL  replay        softmax: rank 1: micro-batch 0, layer 3: made to fail" in output


@pytest.mark.first_release
def test_a_rank_that_raised_ends_the_run(broken: tuple[int, Path, str]) -> None:
    _, folder, _ = broken
    found = json.loads((folder / "one_rank_raises.json").read_text())
    assert list(tried(found)) == [*FEATURES[: FEATURES.index("replay") + 1]]
