"""npu-replay smoke over several processes: what it has to show, and a FAIL for each thing that can break.

Importing Megatron takes longer than a run: one process does, and the ranks are its forks. `breaks` has many
runs in one job, and the rank that speaks leaves what each reported in NAME.json of the job's folder.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import jobs
import npu_replay
from npu_replay import ReplayError, RoutedExperts, TokenLayout
from npu_replay.cli.commands import parser
from npu_replay.seam.call import Call
from npu_replay.sessions.timeline import Timeline
from npu_replay.smoke import checks as smoke_checks
from npu_replay.smoke import model as smoke_model
from npu_replay.smoke import run as smoke
from npu_replay.smoke.options import Options

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
LONG = timedelta(minutes=2)
Break = Callable[[], contextlib.AbstractContextManager[Any]]


# What is broken on purpose


def groups_fail() -> Any:
    place = "megatron.core.parallel_state.initialize_model_parallel"
    return mock.patch(place, side_effect=RuntimeError("no such group"))


def int64_isnt_summed() -> Any:
    """As MindSpeed does with float64: a copy is summed, and never written back."""
    reduce = dist.all_reduce

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return reduce(tensor.clone() if tensor.dtype == torch.int64 else tensor, *args, **kwargs)

    return mock.patch.object(dist, "all_reduce", all_reduce)


def model_diverges() -> Any:
    return mock.patch.object(smoke_model.Norm, "forward", lambda self, hidden: hidden * float("nan"))


def record_changes_choice() -> Any:
    """Of all rows, as a record asks for them; a replay asks for the rows that have no route."""
    native = Call.own

    def changed(self: Call, rows: torch.Tensor | None = None) -> torch.Tensor:
        ids = native(self, rows)
        self.keeps_native_topk = False  # the values have to be those of the changed ids
        return self.plan.num_experts - 1 - ids if rows is None else ids

    return mock.patch.object(Call, "own", changed)


def layout_shifts_rows() -> Any:
    padded = TokenLayout.padded

    def shifted(*args: Any, **kwargs: Any) -> TokenLayout:
        right = padded(*args, **kwargs)
        return TokenLayout(right.rows.roll(1), right.lengths, right.fingerprints, right.parallel)

    return mock.patch.object(TokenLayout, "padded", shifted)


def replay_does_nothing() -> Any:
    def replay(model: Any, routes: Any, **options: Any) -> Any:
        return contextlib.nullcontext()

    return mock.patch.object(npu_replay, "replay", replay)


def one_rank_raises() -> Any:
    """In the middle of the schedule, where the other rank waits for this one."""

    def failing(trial: Any) -> Any:
        if dist.get_rank() == 1:
            router = smoke_model.routers_of(trial.chunks)[-1]
            router.module.register_forward_pre_hook(_raise)
        return smoke_checks.replay(trial)

    return mock.patch.dict(smoke_checks.FEATURES, replay=failing)


def _raise(*_: object) -> None:
    raise ReplayError("made to fail", where="micro-batch 0, layer 3")


def recompute_takes_the_next() -> Any:
    recomputed = Timeline.recomputed

    def other(self: Timeline, *args: Any) -> Any:
        forwards = [forward for _, forward in self.ends]
        return forwards[forwards.index(recomputed(self, *args)) - 1]

    return mock.patch.object(Timeline, "recomputed", other)


def nothing_is_recomputed() -> Any:
    """A model that runs without recompute, where one with it was asked for."""
    return mock.patch.object(smoke_model.megatron_model, "FULL_RECOMPUTE", {})


def scores_lose_their_gradient() -> Any:
    """In a replay alone: a record's top-k is torch's own."""
    answer = Call.answer
    replay = npu_replay.replay

    def detached(*args: Any, **kwargs: Any) -> Any:
        values, ids = answer(*args, **kwargs)
        return torch.return_types.topk((values.detach(), ids))

    @contextlib.contextmanager
    def detaching(model: Any, routes: Any, **options: Any) -> Any:
        with mock.patch.object(Call, "answer", detached), replay(model, routes, **options) as session:
            yield session

    return mock.patch.object(npu_replay, "replay", detaching)


def missing_rows_get_expert_0() -> Any:
    """T1, T42: a row without a route is given made-up experts."""
    replay = npu_replay.replay

    def filled(model: Any, routes: Sequence[RoutedExperts], **options: Any) -> Any:
        return replay(model, [_filled(batch) for batch in routes], **options)

    return mock.patch.object(npu_replay, "replay", filled)


def _filled(routes: RoutedExperts) -> RoutedExperts:
    made_up = torch.arange(routes.topk).expand(routes.ids.shape)
    ids = torch.where(routes.recorded[:, None, None], routes.ids.long(), made_up)
    return RoutedExperts(ids=ids, layers=routes.layers, num_experts=routes.num_experts)


OTHERS = "token-layers show other experts than were replayed"
BREAKS: dict[Break, tuple[str, str]] = {  # each break, the feature that fails then, and what it says
    groups_fail: ("start", "RuntimeError: no such group"),
    int64_isnt_summed: ("collectives", "all_reduce of int64 over 2 ranks gave"),
    model_diverges: ("model", "two runs of one step, without npu_replay, are not comparable: a loss"),
    record_changes_choice: ("record", "token-layers were recorded otherwise than the untouched step chose"),
    layout_shifts_rows: ("collect", "they aren't the routes of their tokens"),
    replay_does_nothing: ("replay", OTHERS),
    one_rank_raises: ("replay", "micro-batch 0, layer 3: made to fail"),
    recompute_takes_the_next: ("recompute", "gradients with recompute and without are"),
    nothing_is_recomputed: ("recompute", "calls of routers were not recomputed"),
    scores_lose_their_gradient: ("gradients", "not comparable: a loss or a gradient is missing"),
    missing_rows_get_expert_0: ("replay", "show other experts than the router's own choice"),
}
RECOMPUTED = (replay_does_nothing, recompute_takes_the_next, nothing_is_recomputed)
"""Those in which recompute is tried too; elsewhere it would only take time."""


# One process of a job

SHORT = 4
"""Seconds of patience where a rank waits for one that raises or hangs; after four times that it is ended."""


def prepare(task: dict[str, Any]) -> None:
    """What all ranks import."""
    import megatron.core.models.gpt  # noqa: F401


def command(task: dict[str, Any]) -> int:
    """The command's exit code with the task's "arguments", with one way of routing."""
    run = functools.partial(smoke.Smoke, routings=["groups"])
    with mock.patch.object(smoke, "Smoke", run):
        return smoke.main(options_of(task["arguments"]))


def options_of(arguments: Sequence[str]) -> Options:
    return Options.of(parser().parse_args(["smoke", "--device", "cpu", *arguments]))


def one_run(store: Any, options: Options, name: str, folder: Path) -> None:
    """Run smoke with a job's process groups, and let the rank that speaks leave what it reported."""
    # In the run before, one rank may have waited for the other as long as the other waits for it here.
    store.set(f"{name} begins on {os.environ['RANK']}", "")
    store.wait([f"{name} begins on {rank}" for rank in range(int(os.environ["WORLD_SIZE"]))], LONG)
    run = smoke.Smoke(options, ["softmax"], dist.PrefixStore(name, store))
    code = run.run()
    if run.speaks:
        report = json.loads(run.report.to_json()) | {"code": code}
        (folder / f"{name}.json").write_text(json.dumps(report))


def breaks(task: dict[str, Any]) -> None:
    """A run with each break, and one in which a rank hangs until it is ended."""
    warnings.simplefilter("ignore")
    folder = Path(task["folder"])
    options = options_of(["--tp", "2", "--ep", "2"])
    store = smoke.Smoke(options).store
    for broken in BREAKS:
        patience = SHORT if broken is one_rank_raises else options.patience
        asked = replace(options, recompute=broken in RECOMPUTED, patience=patience)
        with broken():
            one_run(store, asked, broken.__name__, folder)

    def hanging(trial: Any) -> Any:
        if dist.get_rank() == 1:
            time.sleep(1000)
        return smoke_checks.replay(trial)

    asked = replace(options, patience=SHORT, out=folder / "one_rank_hangs.json")
    with mock.patch.dict(smoke_checks.FEATURES, replay=hanging):
        one_run(store, asked, "hang", folder)


# The tests


def tried(report: dict[str, Any]) -> set[tuple[str, str]]:
    """Each feature with its results."""
    return {(result["feature"], result["result"]) for result in report["results"]}


def job(target: str, ranks: int, **how: Any) -> list[jobs.Ended]:
    """How the ranks ended. They compile nothing: forks of one process took a minute for it on Megatron 0.16.

    Under torchrun and in tests/doctor smoke compiles what Megatron does.
    """
    here = "distributed.test_smoke"
    env = {"TORCHDYNAMO_DISABLE": "1"}
    return jobs.start(f"{here}:{target}", ranks=ranks, before=f"{here}:prepare", env=env, **how)


def test_four_processes_pass_every_feature(tmp_path: Path) -> None:
    """With virtual stages, tensor and expert parallel ranks, and one way of routing.

    The others are tried below, and with recompute in tests/doctor.
    """
    file = tmp_path / "smoke.json"
    arguments = ["--tp", "2", "--pp", "2", "--vp", "2", "--ep", "2", "--recompute", "--out", str(file)]
    ended = job("command", 4, task={"arguments": arguments})
    assert [(process.code, process.answer) for process in ended] == [(0, 0)] * 4, ended[0].problem
    report = json.loads(file.read_text())
    assert tried(report) == {(feature, "PASS") for feature in FEATURES}
    assert report["passed"]
    lines = [line[:4] for line in ended[0].output.splitlines() if line[:1].isupper() and line[4:6] == "  "]
    assert lines == ["PASS"] * len(FEATURES)
    assert not any("PASS" in process.output for process in ended[1:]), "only the first rank speaks"
    assert not any("would choose" in process.output for process in ended), "its own random routes are no news"


@pytest.mark.first_release
def test_the_command_as_people_run_it_with_torchrun(tmp_path: Path) -> None:
    """Context parallel; recompute is tried only if asked for. Without torchrun: tests/cli/test_output.py."""
    file = tmp_path / "smoke.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "npu_replay", "smoke", "--device", "cpu", "--cp", "2", "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    report = json.loads(file.read_text())
    assert tried(report) == {(feature, "PASS") for feature in FEATURES if feature != "recompute"}
    cases = {result["case"] for result in report["results"] if result["feature"] == "replay"}
    assert cases == {"softmax", "sigmoid+bias", "groups"}
    assert len(report["results"]) == 1 + 3 * len(FEATURES[1:-1])
    assert done.stdout.startswith("npu-replay smoke: 2 processes, cp 2, on cpu")


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[jobs.Ended]]:
    """Runs with one break after the other: the folder of their reports, and how both ranks ended."""
    folder = tmp_path_factory.mktemp("broken")
    return folder, job("breaks", 2, folder=folder)


@pytest.mark.first_release
@pytest.mark.parametrize("cause", BREAKS, ids=lambda cause: cause.__name__)
def test_a_break_fails_what_it_breaks_and_ends_the_run(
    broken: tuple[Path, list[jobs.Ended]], cause: Break
) -> None:
    folder, ended = broken
    file = folder / f"{cause.__name__}.json"
    assert file.exists(), ended[0].output
    report = json.loads(file.read_text())
    feature, why = BREAKS[cause]
    *before, last = report["results"]
    assert (last["feature"], last["result"]) == (feature, "FAIL"), last
    assert why in last["why"], last
    assert [(result["feature"], result["result"]) for result in before] == passed_before(feature)
    assert (report["code"], report["passed"]) == (1, False)


def passed_before(feature: str) -> list[tuple[str, str]]:
    return [(earlier, "PASS") for earlier in FEATURES[: FEATURES.index(feature)] if earlier != "recompute"]


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
    *_, last = json.loads((folder / "one_rank_raises.json").read_text())["results"]
    assert last["rank"] == 1
    assert any("_raise" in frame for frame in last["trace"])
    line = "FAIL  replay        softmax: rank 1: micro-batch 0, layer 3: made to fail"
    assert [line in process.output for process in (waited, failed)] == [False, True]
