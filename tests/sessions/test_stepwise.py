"""Record and replay one micro-batch at a time, and errors that wait for the end of the block."""

from __future__ import annotations

import pytest
import torch

import npu_replay
from npu_replay import RoutedExperts
from npu_replay.errors import MicroBatchError, RecomputeError, ReplayError, RouterError
from npu_replay.sessions.record import StepRecording
from npu_replay.sessions.replay import StepReplay
from zoo import toys
from zoo.outcome import gradients
from zoo.toys import ROWS, ToyModel, hooks, recorded, run, same, tokens

pytestmark = pytest.mark.usefixtures("toy_routers")


def foreign(seed: int, layers: tuple[int, ...] = (0, 1), rows: int = ROWS) -> RoutedExperts:
    return toys.foreign(layers=layers, rows=rows, seed=seed)[0]


@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
def test_a_feed_does_what_a_replay_of_all_routes_does(recompute: str | None) -> None:
    """With one backward over the sum of the losses, where a queue would replay the wrong micro-batch."""
    model = ToyModel(recompute=recompute)
    routes = [foreign(seed) for seed in range(3)]
    with npu_replay.replay(model, routes):
        wanted = run(model, 0, 1, 2)
    model.zero_grad()
    with StepReplay(model) as session:
        losses = []
        for seed, one in enumerate(routes):
            session.give(0, one)
            losses.append(model(tokens(seed).requires_grad_()).square().mean())
        loss = sum(losses)
        loss.backward()
    got = loss.item(), gradients(model)
    assert same(wanted, got)
    assert session.metrics()["rows"] == 3 * ROWS
    assert session.counts()["replayed"] == 2
    assert hooks(model) == 0


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
