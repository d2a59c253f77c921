"""DeepSpeed's non-reentrant checkpoint around model and loss: a recompute takes its own forward's experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import npu_replay
from zoo.outcome import gradients, same
from zoo.toys import ToyModel, foreign, tokens

checkpointing = pytest.importorskip(
    "deepspeed.runtime.activation_checkpointing.checkpointing",
    reason="ci/trainers.sh trl runs these tests, with DeepSpeed",
)
pytestmark = pytest.mark.usefixtures("toy_routers")

COUNT = 6


def test_a_recompute_takes_the_experts_of_its_own_forward() -> None:
    model = ToyModel()
    one = torch.ones((), requires_grad=True)

    def loss_of(batch: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean() * scale

    found: list[Any] = []
    for run in (lambda function, *args: function(*args), checkpointing.non_reentrant_checkpoint):
        model.zero_grad()
        with npu_replay.replay(model, foreign(COUNT)):
            losses = [run(loss_of, batch, one) for batch in map(tokens, range(COUNT - 1))]
            with torch.no_grad():
                model(tokens(COUNT))  # a metric: of another micro-batch, with as many tokens
            for loss in losses:
                loss.backward()
        found.append(gradients(model))
    assert same(*found)
