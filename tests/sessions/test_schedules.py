"""What a schedule runs by itself: a recompute outside backward, in another micro-batch's forward (marks).

As MindSpeed's overlap does: tests/on_mindspeed compares its gradients. And a pass of
torch.distributed.pipelining that learns shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

import npu_replay
from npu_replay import routers
from npu_replay.errors import RecomputeError
from npu_replay.routers import Router
from npu_replay.sessions.timeline import Marks
from zoo.toys import HIDDEN, ROWS, ToyModel, ToyRouters, hooks, opened, same, tokens

COUNT = 5


class Rerunning(ToyRouters):
    """Runs the first router again in the next micro-batch's forward, with another input."""

    def mark(self, chunk: nn.Module, of_chunk: Sequence[Router], marks: Marks) -> list[RemovableHandle]:
        self.kept: list[Any] = []  # a rerun is due as long as what it is foreseen with is alive
        self.reruns: list[torch.Tensor] = []
        router = of_chunk[0].module

        def before(layer: nn.Module, args: tuple[torch.Tensor]) -> None:
            if self.kept:
                repeated, _ = self.kept.pop()
                marks.announce(router, repeated)
                self.reruns.append(router(-args[0])[1])
            token = nn.Identity()
            marks.foresee(router, token)
            self.kept.append((marks.running(), token))

        return [chunk.get_submodule("layers.0").register_forward_pre_hook(before)]


@pytest.fixture
def rerunning() -> Iterator[Rerunning]:
    kind = Rerunning()
    routers.register("toy", kind)
    yield kind
    routers.unregister("toy")


@pytest.mark.parametrize("rows_without", [0, 3], ids=["every row", "rows without a route"])
@pytest.mark.parametrize("block", ["record", "replay", "pin_recompute", "observe"])
def test_a_marked_recompute_takes_the_ids_of_its_own_micro_batch(
    block: str, rows_without: int, rerunning: Rerunning
) -> None:
    model = ToyModel()
    forwards: list[torch.Tensor] = []
    model.layers[0].taken.register_forward_pre_hook(lambda _, args: forwards.append(args[0]))
    before = hooks(model)
    with torch.no_grad(), opened(block, model, COUNT, recorded=torch.arange(ROWS) >= rows_without) as session:
        for number in range(COUNT):
            model(tokens(number))
        rerunning.kept.clear()
    assert same(rerunning.reruns, forwards[:-1]) == (block != "observe")
    assert session.metrics()["micro_batches"] == COUNT
    assert hooks(model) == before


@pytest.mark.usefixtures("rerunning")
def test_a_recompute_that_is_still_to_come_when_the_block_ends_is_an_error() -> None:
    model = ToyModel()
    due = pytest.raises(RecomputeError, match="ended before 1 router calls were recomputed")
    with due, torch.no_grad(), npu_replay.record(model):
        model(tokens())


def test_a_mark_that_no_call_took_does_not_reach_the_next_forward(rerunning: Rerunning) -> None:
    """The recompute raised before it came to the router."""
    model = ToyModel()
    with torch.no_grad(), npu_replay.record(model) as recording:
        model(tokens(0))
        repeated = rerunning.kept.pop()[0]
        recording.marks[0].announce(model.layers[0].router, repeated)
        model(tokens(1))
        rerunning.kept.clear()
    assert not torch.equal(recording.routes[0].ids, recording.routes[1].ids)


# torch.distributed.pipelining: its first step runs a stage once more, to learn its shapes

STEPS = 4
BATCH = torch.randn(STEPS * 6, HIDDEN, generator=torch.Generator().manual_seed(1))


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
    return model, ScheduleGPipe(stage, STEPS, loss_fn=nn.functional.mse_loss)


@pytest.mark.slow
@pytest.mark.usefixtures("toy_routers", "process_group")
@pytest.mark.parametrize("block", ["record", "replay", "observe"])
def test_the_pass_that_learns_shapes_is_no_micro_batch(block: str) -> None:
    model, first = schedule()
    with pytest.raises(RuntimeError) as caught, opened(block, model, STEPS, rows=6):
        first.step(BATCH, target=BATCH)
    caught.match("this forward is no micro-batch.*Expected PipelineStage.*run one step before the block")


@pytest.mark.slow
@pytest.mark.usefixtures("toy_routers", "process_group")
@pytest.mark.parametrize("shapes", [{}, dict.fromkeys(("input_args", "output_args"), BATCH[:6])])
def test_a_step_of_a_stage_that_knows_its_shapes_is_recorded_and_replayed(shapes: Any) -> None:
    model, steps = schedule(**shapes)
    if not shapes:  # nothing is told by its number there
        with npu_replay.pin_recompute(model) as pinned:
            steps.step(BATCH, target=BATCH)
        assert pinned.metrics()["micro_batches"] == STEPS + 1
    with npu_replay.record(model) as recording:
        steps.step(BATCH, target=BATCH)
    assert len(recording.routes) == STEPS
    with npu_replay.replay(model, recording.routes) as replayed:
        steps.step(BATCH, target=BATCH)
    assert replayed.metrics()["micro_batches"] == STEPS
