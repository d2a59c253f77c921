"""What a pipeline's schedule does with a block: routes come one micro-batch at a time, and errors wait.

It may run a recompute outside backward, in another micro-batch's forward (marks), as MindSpeed's overlap
does: tests/on_mindspeed compares its gradients. torch.distributed.pipelining has a pass that learns shapes.
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
from npu_replay import RoutedExperts, routers
from npu_replay.errors import MicroBatchError, RecomputeError, ReplayError, RouterError
from npu_replay.routers import Router
from npu_replay.sessions.record import StepRecording
from npu_replay.sessions.replay import StepReplay
from npu_replay.sessions.timeline import Marks
from zoo import toys
from zoo.outcome import gradients
from zoo.toys import HIDDEN, ROWS, ToyModel, ToyRouters, hooks, opened, recorded, run, same, tokens

pytestmark = pytest.mark.usefixtures("toy_routers")

COUNT = 5


def foreign(seed: int, layers: tuple[int, ...] = (0, 1), rows: int = ROWS) -> RoutedExperts:
    return toys.foreign(layers=layers, rows=rows, seed=seed)[0]


def test_a_tap_is_what_was_recorded_and_keeps_it_while_forwards_without_a_graph_come_and_go() -> None:
    model = ToyModel(recompute="non-reentrant")
    wanted = run(model, 0)
    model.zero_grad()
    with StepRecording(model) as session:
        loss = model(tokens(0).requires_grad_()).square().mean()
        tapped = [session.take(0)]
        with torch.no_grad():
            for seed in (1, 2, 3):
                model(tokens(seed))
                tapped.append(session.take(0))
        loss.backward()
    assert same(wanted, (loss.item(), gradients(model)))
    assert tapped == recorded(model, 0, 1, 2, 3)


def test_routes_without_a_forward_are_refused() -> None:
    model = ToyModel()
    with pytest.raises(MicroBatchError, match="a forward that never came"), StepReplay(model) as session:
        session.give(0, foreign(0))
        model(tokens(0))
        session.give(0, foreign(1))


def test_routes_that_lack_a_layer_are_refused_at_once() -> None:
    with StepReplay(ToyModel()) as session:
        with pytest.raises(RouterError, match="missing from the routes"):
            session.give(0, foreign(0, layers=(0,)))
        session.give(0, foreign(0))
        session.chunks[0](tokens(0))


@pytest.mark.parametrize("chunk", [-1, 1])
def test_a_chunk_that_there_is_not_and_a_block_that_is_left_are_refused(chunk: int) -> None:
    """-1 would be the last chunk."""
    with StepReplay(ToyModel()) as replay:
        replay.give(0, foreign(0))
        with pytest.raises(MicroBatchError, match="no chunk of this block"):
            replay.give(chunk, foreign(0))
        replay.chunks[0](tokens())
    with StepRecording(ToyModel()) as recording:
        recording.chunks[0](tokens())
        with pytest.raises(MicroBatchError, match="nothing was recorded"):
            recording.take(chunk)
    for late in (lambda: recording.take(0), lambda: replay.give(0, foreign(0))):
        with pytest.raises(MicroBatchError, match="isn't open"):
            late()


@pytest.mark.parametrize("recompute", ["reentrant", "non-reentrant"])
def test_after_a_deferred_error_a_recompute_goes_on_too(recompute: str) -> None:
    """It would die of its own error otherwise, in the middle of backward."""
    model = ToyModel(recompute=recompute)
    wanted = run(model, 0)
    waits = pytest.raises(MicroBatchError, match="micro-batch 0: no routes were given")
    with waits, StepReplay(model, errors_wait=True):
        assert same(wanted, run(model, 0))


def test_the_error_of_a_recompute_waits_too() -> None:
    model = ToyModel(recompute="reentrant")
    older = model(tokens(9).requires_grad_()).sum()
    waits = pytest.raises(RecomputeError, match="belongs to no forward of this block")
    with waits, StepReplay(model, errors_wait=True, min_overlap=0) as session:
        session.give(0, foreign(0))
        run(model, 0)
        model.zero_grad()
        older.backward()
    assert all(map(torch.is_tensor, gradients(model))), "backward has ended"


def test_a_foreign_exception_is_not_hidden_by_a_deferred_error() -> None:
    with pytest.raises(ZeroDivisionError), StepReplay(ToyModel(), errors_wait=True) as session:
        session.defer(ReplayError("waits"))
        raise ZeroDivisionError


# Recomputes outside backward


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
def rerunning(toy_routers: None) -> Rerunning:
    kind = Rerunning()
    routers.register("toy", kind)
    return kind


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
@pytest.mark.usefixtures("process_group")
def test_routes_of_a_step_that_learns_shapes_are_too_many_for_the_next() -> None:
    model, steps = schedule()
    with npu_replay.record(model) as recording:
        steps.step(BATCH, target=BATCH)
    with (
        pytest.raises(MicroBatchError, match="fewer micro-batches"),
        npu_replay.replay(model, recording.routes),
    ):
        steps.step(BATCH, target=BATCH)
    model, steps = schedule()
    wrong = pytest.raises(RuntimeError)  # torch's, around ours
    with wrong as caught, npu_replay.replay(model, recording.routes[1:]):
        steps.step(BATCH, target=BATCH)
    assert "more micro-batches than routes" in str(caught.value.__cause__)


@pytest.mark.slow
@pytest.mark.usefixtures("process_group")
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
