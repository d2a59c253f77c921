"""One process of a smoke job: the command, or runs that are broken, one after the other.

Importing Megatron takes longer than a run: one process does, and the ranks are its forks. `breaks` has many
runs in one job.
The rank that speaks leaves what each reported in NAME.json of the job's folder.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import npu_replay
from npu_replay import ReplayError, RoutedExperts, TokenLayout
from npu_replay.cli.commands import parser
from npu_replay.seam.call import Call
from npu_replay.sessions.timeline import Timeline
from npu_replay.smoke import checks as smoke_checks
from npu_replay.smoke import model as smoke_model
from npu_replay.smoke import run as smoke
from npu_replay.smoke.options import Options

LONG = timedelta(minutes=2)

Break = Callable[[], contextlib.AbstractContextManager[Any]]


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
        found = native(self, rows)
        self.keeps_native_topk = False  # the values have to be those of the changed ids
        return self.plan.num_experts - 1 - found if rows is None else found

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
        return replay(model, [_filled(one) for one in routes], **options)

    return mock.patch.object(npu_replay, "replay", filled)


def _filled(routes: RoutedExperts) -> RoutedExperts:
    made_up = torch.arange(routes.topk).expand(routes.ids.shape)
    ids = torch.where(routes.recorded[:, None, None], routes.ids.long(), made_up)
    return RoutedExperts(ids=ids, layers=routes.layers, num_experts=routes.num_experts)


BREAKS: tuple[Break, ...] = (
    groups_fail,
    int64_isnt_summed,
    model_diverges,
    record_changes_choice,
    layout_shifts_rows,
    replay_does_nothing,
    one_rank_raises,
    recompute_takes_the_next,
    nothing_is_recomputed,
    scores_lose_their_gradient,
    missing_rows_get_expert_0,
)

RECOMPUTED = (replay_does_nothing, recompute_takes_the_next, nothing_is_recomputed)
"""Those in which recompute is tried too; elsewhere it would only take time."""


SHORT = 4
"""Seconds of patience where a rank waits for one that raises, or hangs: it ends itself after four times that."""


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
        found = json.loads(run.report.to_json()) | {"code": code, "heading": run.report.heading()}
        (folder / f"{name}.json").write_text(json.dumps(found))


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
