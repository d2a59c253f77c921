"""npu-replay smoke over several processes: what it has to show, and a FAIL for each thing that can break."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from npu_replay.smoke import hybrid_model

BROKEN = Path(__file__).with_name("smoke_broken.py")
FEATURES = (
    "start",
    "collectives",
    "model",
    "record",
    "collect",
    "mismatch",
    "replay",
    "recompute",
    "gradients",
    "own choice",
    "uninstall",
)
pytestmark = [pytest.mark.megatron, pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(400)]


def launch(
    processes: int, script: list[str], arguments: list[str], timeout: float = 200
) -> tuple[int, str, str]:
    """Run a job on a port of its own; return its exit code, what it printed, and its complaints."""
    command = [sys.executable]
    if processes:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    path = os.pathsep.join([str(BROKEN.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
    job = subprocess.Popen(
        [*command, *script, *arguments],
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        out, complaints = job.communicate(timeout=timeout)
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    return job.returncode, out, complaints


def smoke(processes: int, folder: Path, *options: str) -> tuple[dict[str, Any], str]:
    """A run that has to pass: its JSON and what it printed."""
    file = folder / "smoke.json"
    arguments = ["smoke", "--device", "cpu", "--out", str(file), *options]
    code, out, complaints = launch(processes, ["-m", "npu_replay"], arguments)
    assert code == 0, f"{out}\n{complaints}"
    return json.loads(file.read_text()), out


def tried(found: dict[str, Any]) -> dict[str, set[str]]:
    """The results of each feature."""
    results: dict[str, set[str]] = {}
    for one in found["results"]:
        results.setdefault(one["feature"], set()).add(one["result"])
    return results


def test_four_processes_pass_every_feature(tmp_path: Path) -> None:
    found, out = smoke(4, tmp_path, "--tp", "2", "--pp", "2", "--ep", "2", "--recompute")
    assert tried(found) == {feature: {"PASS"} for feature in FEATURES}
    assert found["passed"]
    assert [line[:4] for line in out.splitlines() if line[:1].isupper() and line[4:6] == "  "] == [
        "PASS"
    ] * len(FEATURES)
    cases = {one["case"] for one in found["results"] if one["feature"] == "replay"}
    assert cases == {"softmax", "sigmoid+bias", "groups"}


def test_virtual_stages_pass(tmp_path: Path) -> None:
    found, _ = smoke(2, tmp_path, "--pp", "2", "--vp", "2", "--recompute")
    assert tried(found) == {feature: {"PASS"} for feature in FEATURES}


def test_context_parallelism_passes_and_recompute_is_tried_only_if_asked_for(tmp_path: Path) -> None:
    found, out = smoke(2, tmp_path, "--cp", "2")
    assert tried(found) == {feature: {"SKIP" if feature == "recompute" else "PASS"} for feature in FEATURES}
    assert "SKIP  recompute     not asked for" in out


def test_one_process_without_torchrun(tmp_path: Path) -> None:
    found, out = smoke(0, tmp_path, "--recompute")
    assert tried(found) == {feature: {"PASS"} for feature in FEATURES}
    assert out.startswith("npu-replay smoke: 1 process, on cpu")


@pytest.mark.parametrize("sizes", [[], ["--pp", "2"], ["--tp", "2"], ["--pp", "2", "--vp", "2"]])
def test_a_hybrid_model_passes_every_feature(tmp_path: Path, sizes: list[str]) -> None:
    if why := hybrid_model.missing("|" if "--vp" in sizes else "E"):
        pytest.skip(why)
    found, out = smoke(2 if sizes else 0, tmp_path, "--model", "hybrid", "--recompute", *sizes)
    assert tried(found) == {feature: {"PASS"} for feature in FEATURES}
    assert out.startswith("npu-replay smoke: HybridModel, ")
    assert found["options"]["model"] == "hybrid"


@pytest.mark.parametrize("sizes", [[], ["--pp", "2", "--vp", "2"]])
def test_a_release_without_such_a_hybrid_model_says_from_which_on(sizes: list[str]) -> None:
    why = hybrid_model.missing("|" if sizes else "E")
    if not why:
        pytest.skip("this release has it")
    arguments = ["smoke", "--device", "cpu", "--model", "hybrid", *sizes]
    code, out, _ = launch(2 if sizes else 0, ["-m", "npu_replay"], arguments)
    assert code == 1
    said = " ".join(out.split())
    assert f"FAIL start rank 0: --model hybrid: {why}" in said
    assert re.search(r"needs Megatron-core 0\.1[67] or newer", said)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path, str]:
    """Runs with one break after the other: the exit code of the last, their reports, and the output."""
    folder = tmp_path_factory.mktemp("broken")
    options = ["--tp", "2", "--ep", "2", "--device", "cpu", "--patience", "6"]
    code, out, complaints = launch(2, [str(BROKEN)], [str(folder), *options])
    return code, folder, f"{out}\n{complaints}"


OTHERS = "token-layers show other experts than were replayed"
BREAKS: dict[str, dict[str, str]] = {  # each break, what fails then, and why it says that it does
    "groups_fail": {"start": "RuntimeError: no such group"},
    "int64_isnt_summed": {"collectives": "all_reduce of torch.int64 over group 0 of 2 ranks gave"},
    "model_diverges": {"model": "two runs of one step, without npu_replay, are not comparable: a loss"},
    "record_shifts_rows": {
        "record": "token-layers were recorded otherwise than npu_replay.observe saw them",
        "collect": "they aren't the routes of their tokens",
    },
    "record_changes_choice": {"record": "token-layers were recorded otherwise than the untouched step chose"},
    "layout_shifts_rows": {"collect": "they aren't the routes of their tokens"},
    "nothing_is_perturbed": {"mismatch": "a replay would show nothing"},
    "replay_does_nothing": {"replay": OTHERS, "recompute": OTHERS, "own choice": OTHERS},
    "one_rank_raises": {"replay": "micro-batch 0, layer 3: made to fail"},
    "recompute_takes_the_next": {"recompute": "gradients with recompute and without are"},
    "nothing_is_recomputed": {"recompute": "calls of routers were not recomputed, of"},
    "scores_lose_their_gradient": {
        "record": "a recorded step and an untouched one are not comparable",
        "gradients": "not comparable: a loss or a gradient is missing",
    },
    "missing_rows_get_expert_0": {"own choice": "show other experts than the router's own choice"},
    "a_patch_stays": {"uninstall": "torch.left_by_npu_replay is still replaced"},
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
    assert "the features after it were not tried" in " ".join(output.split())


@pytest.mark.first_release
def test_the_rank_that_failed_is_heard_and_not_the_one_that_waited(broken: tuple[int, Path, str]) -> None:
    _, folder, output = broken
    found = json.loads((folder / "one_rank_raises.json").read_text())
    failed = [one for one in found["results"] if one["result"] == "FAIL"]
    assert [one["rank"] for one in failed] == [1]
    assert any("_raise" in frame for frame in failed[0]["trace"])
    assert "FAIL  replay        softmax: rank 1: micro-batch 0, layer 3: made to fail" in output


@pytest.mark.first_release
def test_what_comes_after_a_rank_that_failed_is_tried(broken: tuple[int, Path, str]) -> None:
    _, folder, _ = broken
    found = json.loads((folder / "one_rank_raises.json").read_text())
    assert tried(found) == {feature: {"FAIL" if feature == "replay" else "PASS"} for feature in FEATURES}


@pytest.mark.first_release
def test_only_the_first_rank_speaks(broken: tuple[int, Path, str]) -> None:
    _, _, output = broken
    assert output.count("FAIL  mismatch") == 1


@pytest.mark.first_release
def test_a_model_that_doesnt_train_is_not_replays_fault(broken: tuple[int, Path, str]) -> None:
    _, folder, _ = broken
    found = json.loads((folder / "model_diverges.json").read_text())
    assert tried(found)["replay"] == {"SKIP"}
    assert tried(found)["uninstall"] == {"PASS"}
