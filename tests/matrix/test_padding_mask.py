"""padding_mask, where the release's routers take one: through record and replay, and in the expert bias."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay.smoke import megatron_model
from zoo.gpt import BATCH, LENGTH, SIGMOID_BIAS, Trainer, build, random_routes, routers
from zoo.outcome import same

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

LOSSES: dict[str, Any] = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-1,
    "moe_z_loss_coeff": 1e-1,
}
PADDED = torch.arange(LENGTH).expand(BATCH, LENGTH) >= torch.tensor([[LENGTH], [LENGTH - 5]])
"""bool [batch, length], True where a token is padding: the last five of the second sequence."""


@pytest.fixture(autouse=True)
def _masks(megatron: None) -> None:
    routing = import_module("megatron.core.transformer.moe.router").TopKRouter.routing
    if "padding_mask" not in inspect.signature(routing).parameters:
        pytest.skip("this release's routers take no padding_mask")


def step(trainer: Trainer, mask: torch.Tensor | None = PADDED) -> list[torch.Tensor]:
    """The loss of one micro-batch and the gradients of its routers."""
    trainer.model.zero_grad()
    tokens = trainer.batches[0]
    given = {} if mask is None else {"padding_mask": mask}
    inputs = megatron_model.causal(tokens) | given
    loss = trainer.model(input_ids=tokens, labels=tokens.roll(-1, 1), **inputs).mean()
    loss.backward()
    return [loss.detach(), *(router.module.weight.grad.clone() for router in routers(trainer.model))]


@pytest.mark.capability("padding_mask")
@pytest.mark.parametrize("recompute", [None, "full"])
def test_a_mask_means_the_same_in_a_record_and_in_its_replay(recompute: str | None) -> None:
    trainer = build(LOSSES, recompute)
    untouched = step(trainer)
    assert not same(untouched, step(trainer, mask=None)), "this mask should matter"
    with npu_replay.record(trainer.model) as recording:
        recorded = step(trainer)
    with npu_replay.replay(trainer.model, recording.routes):
        replayed = step(trainer)
    assert same(recorded, untouched)
    assert same(replayed, untouched)


@pytest.mark.capability("bias_mask")
@pytest.mark.parametrize("recompute", [None, "full"])
def test_padding_is_not_counted_for_the_expert_bias(recompute: str | None) -> None:
    """T24d: a mask [rows] over a map [rows, experts] is spread along the wrong side, or not at all."""
    trainer = build(SIGMOID_BIAS, recompute)
    found = [router.module for router in routers(trainer.model)]
    with npu_replay.record(trainer.model) as recording:
        trainer.loss(trainer.batches[0])
    foreign = random_routes(recording.routes)[0]
    for router in found:
        router.local_tokens_per_expert.zero_()
    with npu_replay.replay(trainer.model, [foreign]):
        step(trainer)
    kept = ~PADDED.t().flatten()  # the router's rows are sequence-major
    for number, router in enumerate(found):
        ids = foreign.layer_ids(number).long()[kept]
        assert router.local_tokens_per_expert.tolist() == ids.flatten().bincount(minlength=8).tolist()
