"""Megatron-core on an accelerator, in one process: the CPU's routes give the CPU's losses there."""

from __future__ import annotations

import pytest
import torch

import npu_replay
from zoo.gpt import MICRO_BATCHES, VARIANTS, build, hooks, perturbed, routers, same
from zoo.outcome import random_routes

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]

CASES = [
    ("groups_sigmoid_bias", "full"),
    ("sigmoid_bias_scaling", "selective_moe"),
    ("softmax_after_topk", "non_reentrant_in_reentrant"),
    ("capacity_padded", "full"),
    ("aux_loss", "layers_non_reentrant"),
]


@pytest.mark.parametrize(
    ("variant", "recompute"),
    # The first on a simulated device; all of them on a real one, and in ci/all.sh.
    [pytest.param(*case, marks=[pytest.mark.long] * (case != CASES[0])) for case in CASES],
)
def test_record_and_replay_are_bit_equal_and_recompute_finds_its_own(
    variant: str, recompute: str | None, device: torch.device
) -> None:
    small = VARIANTS[variant] | {"num_layers": 2}
    trainer = build(small, recompute)
    assert next(trainer.model.parameters()).device.type == device.type
    untouched = trainer.run("sum")
    with npu_replay.record(trainer.model) as recording:
        assert same(trainer.run("sum"), untouched)
    with (
        perturbed(trainer.model),
        npu_replay.observe(trainer.model) as seen,
        npu_replay.replay(trainer.model, recording.routes),
    ):
        trainer.run("sum")
    if "capacity" not in variant:  # which drops some of them
        assert npu_replay.compare(seen.shown, recording.routes).differing == 0
    labels = [router.label for router in routers(trainer.model)]
    routes = random_routes([24] * MICRO_BATCHES, labels, 8, 2, seed=5)
    plain = build(small)
    with npu_replay.replay(plain.model, routes):
        expected = plain.run("sum")
    with npu_replay.replay(trainer.model, routes):
        assert same(trainer.run("sum"), expected)
    assert hooks(trainer.model) == 0
