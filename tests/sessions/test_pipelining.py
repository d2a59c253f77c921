"""torch.distributed.pipelining: its first step runs a stage once more, to learn its shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import npu_replay
from zoo.toys import HIDDEN, ToyModel, opened

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("toy_routers", "process_group")]

COUNT = 4
BATCH = torch.randn(COUNT * 6, HIDDEN, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def process_group() -> Iterator[None]:
    own = not dist.is_initialized()  # Megatron's group stays in the process of its tests
    if own:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if own:
        dist.destroy_process_group()


def schedule(**shapes: torch.Tensor) -> tuple[ToyModel, Any]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model = ToyModel()
    stage = PipelineStage(model, 0, 1, torch.device("cpu"), **shapes)
    return model, ScheduleGPipe(stage, COUNT, loss_fn=nn.functional.mse_loss)


@pytest.mark.parametrize("block", ["record", "replay", "observe"])
def test_the_pass_that_learns_shapes_is_no_micro_batch(block: str) -> None:
    model, first = schedule()
    with pytest.raises(RuntimeError) as caught, opened(block, model, COUNT, rows=6):
        first.step(BATCH, target=BATCH)
    caught.match("this forward is no micro-batch.*Expected PipelineStage.*run one step before the block")


@pytest.mark.parametrize("shapes", [{}, dict.fromkeys(("input_args", "output_args"), BATCH[:6])])
def test_a_step_of_a_stage_that_knows_its_shapes_is_recorded_and_replayed(shapes: Any) -> None:
    model, steps = schedule(**shapes)
    if not shapes:  # nothing is told by its number there
        with npu_replay.pin_recompute(model) as pinned:
            steps.step(BATCH, target=BATCH)
        assert pinned.metrics()["micro_batches"] == COUNT + 1
    with npu_replay.record(model) as recording:
        steps.step(BATCH, target=BATCH)
    assert len(recording.routes) == COUNT
    with npu_replay.replay(model, recording.routes) as replayed:
        steps.step(BATCH, target=BATCH)
    assert replayed.metrics()["micro_batches"] == COUNT
