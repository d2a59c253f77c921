"""Marks: a recompute that a schedule runs by itself, outside backward, in another micro-batch's forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import npu_replay
from npu_replay import RoutedExperts, routers
from npu_replay.errors import MicroBatchError, RecomputeError
from npu_replay.routers import Router
from npu_replay.sessions.timeline import Marks
from zoo.toys import EXPERTS, HIDDEN, ROWS, ToyLayer, ToyModel, ToyRouters, foreign, hooks, tokens

SEEDS = (0, 1, 2, 3, 4)


@dataclass(eq=False)
class Kept:
    """What a layer keeps to run again: its input."""

    layer: ToyLayer
    hidden: torch.Tensor
    again: Callable[[], None] = lambda: None


class Interleaved(ToyModel):
    """Runs its layers without a graph and keeps their inputs; runs each again when its backward comes, which
    is in the next micro-batch's forward, before the layer of that."""

    due: list[Kept]
    gradient: torch.Tensor

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        due = getattr(self, "due", [])
        self.due = []
        for layer in self.layers:
            if due:
                self.backward_of(due.pop())
            self.due.append(Kept(layer, hidden.detach()))
            with torch.no_grad():
                hidden = self.announced(layer, hidden)
        return hidden

    def announced(self, layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return layer(hidden)

    def backward_of(self, kept: Kept) -> None:
        kept.again()
        hidden = kept.hidden.requires_grad_()
        ToyLayer.forward(kept.layer, hidden).backward(self.gradient)
        assert hidden.grad is not None
        self.gradient = hidden.grad

    def train(self: Any, *seeds: int) -> list[torch.Tensor]:
        """The gradients of the sum of all outputs' squares, one micro-batch after the other."""
        self.zero_grad()
        self.due = []
        for seed in seeds:
            output = self(tokens(seed))
            self.gradient = 2 * output
        while self.due:
            self.backward_of(self.due.pop())
        return [parameter.grad.clone() for parameter in self.parameters()]


class Rerun:
    """Alive as long as what is kept."""


class MarkingRouters(ToyRouters):
    """Marks what Interleaved runs again."""

    def mark(self, chunk: nn.Module, found: Sequence[Router], marks: Marks) -> list[RemovableHandle]:
        if not isinstance(chunk, Interleaved):
            return []
        return [
            layer.register_forward_pre_hook(self._before(chunk, layer, router, marks))
            for layer, router in zip(chunk.layers, found, strict=True)
        ]

    def _before(self, chunk: Any, layer: nn.Module, router: Router, marks: Marks) -> Callable[..., None]:
        def before(module: nn.Module, args: object) -> None:
            number, token = marks.running(), Rerun()
            kept = chunk.due[-1]
            assert kept.layer is layer
            marks.foresee(router.module, token)

            def again(alive: Rerun = token, before: Callable[[], None] = kept.again) -> None:
                before()
                marks.announce(router.module, number)

            kept.again = again

        return before


@pytest.fixture(autouse=True)
def marking() -> Iterator[None]:
    routers.register("toy", MarkingRouters())
    yield
    routers.unregister("toy")


def routes(rows_without: Sequence[int] = ()) -> list[RoutedExperts]:
    recorded = torch.ones(ROWS, dtype=torch.bool)
    recorded[list(rows_without)] = False
    return foreign(len(SEEDS), recorded=recorded)


def gradients_of_autograd(
    model: ToyModel, *, replayed: list[RoutedExperts] | None = None
) -> list[torch.Tensor]:
    """The same model, with one graph a micro-batch and no recompute."""
    plain = ToyModel()
    plain.load_state_dict(model.state_dict())
    if replayed is None:
        sum(plain(tokens(seed)).square().sum() for seed in SEEDS).backward()
    else:
        with npu_replay.replay(plain, replayed):
            sum(plain(tokens(seed)).square().sum() for seed in SEEDS).backward()
    return [parameter.grad for parameter in plain.parameters()]  # type: ignore[misc]


def close(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.allclose(x, y, rtol=1e-4, atol=1e-6) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("rows_without", [(), (0, 3)], ids=["every row", "rows without a route"])
def test_a_marked_recompute_takes_the_routes_of_its_own_micro_batch(rows_without: tuple[int, ...]) -> None:
    model = Interleaved()
    given = routes(rows_without)
    with npu_replay.replay(model, given):
        gradients = model.train(*SEEDS)
    assert close(gradients, gradients_of_autograd(model, replayed=given))
    assert not close(gradients, gradients_of_autograd(model))
    assert hooks(model) == 0


@pytest.mark.parametrize("block", [npu_replay.record, npu_replay.pin_recompute])
def test_recording_and_pinning_change_nothing_and_hold_on_to_the_forward(block: Callable[..., Any]) -> None:
    model = Interleaved()
    plain = model.train(*SEEDS)
    with block(model) as session:
        assert all(torch.equal(x, y) for x, y in zip(model.train(*SEEDS), plain, strict=True))
    if block is npu_replay.record:
        assert len(session.routes) == len(SEEDS)
        with torch.no_grad():
            for layer in model.layers:
                layer.router.weight += torch.randn(EXPERTS, HIDDEN)
        with npu_replay.replay(model, session.routes), npu_replay.observe(model) as seen:
            model.train(*SEEDS)
        for mine, theirs in zip(seen.shown, session.routes, strict=True):
            assert torch.equal(mine.ids.sort(-1).values, theirs.ids.sort(-1).values)


def test_a_recompute_that_nobody_marked_is_an_error_and_not_another_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Marks, "announce", lambda *_: None)
    model = Interleaved()
    with pytest.raises(MicroBatchError, match="called again before the forward"), npu_replay.record(model):
        model.train(*SEEDS)
    assert hooks(model) == 0


def test_a_recompute_that_is_still_to_come_when_the_block_ends_is_an_error() -> None:
    model = Interleaved()
    with (
        pytest.raises(RecomputeError, match="ended before 2 router calls were recomputed"),
        npu_replay.record(model),
    ):
        model.due = []
        model.gradient = 2 * model(tokens(0))
    model.due = []


def test_a_mark_that_no_call_took_does_not_reach_the_next_forward() -> None:
    """The recompute raised before it came to the router."""
    model = Interleaved()
    with npu_replay.record(model) as recording:
        model.due = []
        model(tokens(0))
        model.due[0].again()
        model.due = []
        model(tokens(1))
        model.due = []
    assert len(recording.routes) == 2
    assert not torch.equal(recording.routes[0].ids, recording.routes[1].ids)
