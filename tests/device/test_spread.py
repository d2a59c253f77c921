"""One model on two devices, as device_map="auto" lays it: an accelerator, and a second one or the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import npu_replay
from zoo.toys import ROWS, ToyModel, ToyRouter, foreign, tokens

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.usefixtures("toy_routers"),
]

SEEDS = (0, 1, 2)


class Spread(nn.Module):
    """Each layer's input goes to the layer's device."""

    def __init__(self, model: ToyModel, places: list[torch.device], how: str | None) -> None:
        super().__init__()
        self.layers = model.layers
        self.places = places
        self.how = how
        for layer, place in zip(self.layers, places, strict=True):
            layer.to(place)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.how is None or "whole" not in self.how:
            return self._layers(hidden, self.how)
        inner = self.how.partition(" and ")[2] or None
        return checkpoint(self._layers, hidden, inner, use_reentrant=True)

    def _layers(self, hidden: torch.Tensor, how: str | None) -> torch.Tensor:
        for layer, place in zip(self.layers, self.places, strict=True):
            hidden = hidden.to(place)
            hidden = (
                layer(hidden) if how is None else checkpoint(layer, hidden, use_reentrant=how == "reentrant")
            )
        return hidden.cpu()


def spread(device: torch.device, how: str | None = None, *, one_place: bool = False) -> Spread:
    other = torch.device(device.type, 1) if torch.accelerator.device_count() > 1 else torch.device("cpu")
    places = [torch.device("cpu")] * 4 if one_place else [device, other] * 2
    made = [ToyRouter(drops=number > 1) for number in range(4)]
    return Spread(ToyModel(*made), places, how)


def run(model: nn.Module) -> list[torch.Tensor]:
    model.zero_grad()
    losses = [(model(tokens(seed).requires_grad_()) * (seed + 1)).square().mean() for seed in SEEDS]
    torch.stack(losses).sum().backward()
    return [*(loss.detach() for loss in losses), *(p.grad.cpu() for p in model.parameters())]


def check_close(outcome: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    torch.testing.assert_close(outcome, expected, rtol=1e-3, atol=1e-5)


HOW = [None, "reentrant", "non-reentrant", "whole", "whole and reentrant", "whole and non-reentrant"]


@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_record_of_a_spread_model_is_that_of_one_place(how: str | None, device: torch.device) -> None:
    with npu_replay.record(spread(device, one_place=True)) as expected:
        run(expected.chunks[0])
    model = spread(device, how)
    with npu_replay.record(model) as recording:
        run(model)
    assert npu_replay.compare(recording.routes, expected.routes).differing == 0
    assert recording.metrics()["capacity_dropped"] == 0


@pytest.mark.choice
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_a_replay_of_a_spread_model_is_that_of_one_place(
    how: str | None, holes: bool, device: torch.device
) -> None:
    """A checkpoint in a reentrant one runs on another device's thread, without the outer one's frames."""
    outcomes: list[Any] = []
    for model in (spread(device, one_place=True), spread(device, how)):
        with npu_replay.replay(
            model,
            foreign(len(SEEDS), layers=4, recorded=torch.arange(ROWS) % 3 != 0 if holes else None),
            live_mismatch=True,
        ) as session:
            outcomes.append(run(model))
        outcomes.append(session.metrics()["live_mismatch"])
    check_close(outcomes[2], outcomes[0])
    assert outcomes[1] == outcomes[3] > 0.5


@pytest.mark.parametrize("how", HOW[1:])
def test_pin_recompute_changes_nothing_on_a_spread_model(how: str, device: torch.device) -> None:
    model = spread(device, how)
    untouched = run(model)
    with npu_replay.pin_recompute(model):
        check_close(run(model), untouched)  # two devices' threads add in no fixed order
