"""Megatron-core on an accelerator, in one process: the CPU's routes give the CPU's losses there."""

from __future__ import annotations

import pytest
import torch

from zoo.gpt import VARIANTS, build, check_foreign_routes, hooks

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
    check_foreign_routes(trainer, build(small), "sum", drops="capacity" in variant)
    assert hooks(trainer.model) == 0
