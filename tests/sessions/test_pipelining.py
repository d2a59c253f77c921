"""torch.distributed.pipelining: its first step runs a stage once more, to learn its shapes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

import jobs
import npu_replay
from zoo.toys import HIDDEN, ToyModel, ToyRouters

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

COUNT = 4


def test_the_pass_that_learns_shapes_is_no_micro_batch() -> None:
    (found,) = jobs.run_ranks("sessions.test_pipelining:main", {}, 1)
    refused = "this forward is no micro-batch.*Expected PipelineStage.*run one step before the block"
    for block in ("record", "replay"):
        assert re.search(refused, found[f"first {block}"]), found[f"first {block}"]
    assert found["routes"] == {"later": COUNT, "told": COUNT}
    assert found["pinned"] == COUNT + 1, "nothing is told by its number there"
    assert found["replayed"] == COUNT


def main(task: dict[str, Any]) -> dict[str, Any]:
    torch.distributed.init_process_group("gloo")
    npu_replay.routers.register("toy", ToyRouters())
    batch = torch.randn(COUNT * 6, HIDDEN, generator=torch.Generator().manual_seed(1))
    found: dict[str, Any] = {"routes": {}}
    model, first = schedule()
    for block in ("record", "replay"):
        try:
            given = [] if block == "record" else [[routes_of(model, batch)] * COUNT]
            with getattr(npu_replay, block)(model, *given):
                first.step(batch, target=batch)
        except Exception as error:
            found[f"first {block}"] = f"{error} {error.__cause__}"
        model, first = schedule()
    with npu_replay.pin_recompute(model) as pinned:
        first.step(batch, target=batch)
    found["pinned"] = pinned.metrics()["micro_batches"]
    with npu_replay.record(model) as later:
        first.step(batch, target=batch)
    with npu_replay.replay(model, later.routes) as replayed:
        first.step(batch, target=batch)
    found["replayed"] = replayed.metrics()["micro_batches"]
    model, first = schedule(input_args=batch[:6], output_args=batch[:6])
    with npu_replay.record(model) as told:
        first.step(batch, target=batch)
    found["routes"] = {"later": len(later.routes), "told": len(told.routes)}
    torch.distributed.destroy_process_group()
    return found


def routes_of(model: nn.Module, batch: torch.Tensor) -> npu_replay.RoutedExperts:
    with torch.no_grad(), npu_replay.record(model) as recording:
        model(batch[:6])
    return recording.routes[0]


def schedule(**shapes: torch.Tensor) -> tuple[nn.Module, Any]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model = ToyModel()
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), **shapes)
    return model, ScheduleGPipe(stage, COUNT, loss_fn=nn.functional.mse_loss)
