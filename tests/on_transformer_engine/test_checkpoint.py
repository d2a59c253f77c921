"""Transformer Engine's checkpoint: around layers and MoE layers, and as Megatron-core's own under FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from transformer_engine.pytorch import distributed

from fused_kernel import FUSION
from zoo.gpt import RECOMPUTE, VARIANTS, build, check_foreign_routes

pytestmark = [
    pytest.mark.usefixtures("megatron"),
    # torch says so of a reentrant checkpoint inside another's first pass, which runs under no_grad
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]

SMALL = {"num_layers": 2}
FP8 = {"fp8": "e4m3", "fp8_recipe": "tensorwise"}
"""Then Megatron-core recomputes by Transformer Engine's checkpoint."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was checkpointed."""
    calls: list[Any] = []
    native = distributed.checkpoint

    def checkpoint(function: Any, *args: Any, **options: Any) -> Any:
        calls.append(function)
        return native(function, *args, **options)

    monkeypatch.setattr(distributed, "checkpoint", checkpoint)
    return calls


def checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return distributed.checkpoint(lambda hidden: forward(hidden, *args, **kwargs), hidden_states)

    return run


@pytest.mark.parametrize(
    ("part", "variant", "order"),
    [
        ("layers", "softmax_after_topk", "thread"),
        ("MoE", "groups_sigmoid_bias", "reversed"),
        ("layers in a checkpoint of the model", "sigmoid_bias_scaling", "sum"),
    ],
)
def test_around_parts_of_the_model(calls: list[Any], part: str, variant: str, order: str) -> None:
    changes = SMALL | VARIANTS[variant]
    whole = "whole_model_reentrant" if "of the model" in part else None
    trainer = build(changes, whole)
    for layer in trainer.model.decoder.layers:
        module = layer.mlp if part == "MoE" else layer
        module.forward = checkpointed(module.forward)
    check_foreign_routes(trainer, build(changes), order)
    assert calls


@pytest.mark.parametrize(
    ("recompute", "variant", "order", "more"),
    [
        ("full", "softmax_after_topk", "sum", FUSION),
        ("full", "capacity_probs", "each", {}),
        ("full_two_layers", "groups_softmax", "reversed", {}),
        ("block", "sigmoid_bias_scaling", "thread", {"num_layers": 3}),
        ("selective_moe", "aux_loss", "sum", {}),
        ("selective_attention_and_moe", "groups_sigmoid_bias", "thread", FUSION),
    ],
)
def test_as_the_recompute_of_megatron(
    calls: list[Any], recompute: str, variant: str, order: str, more: dict[str, Any]
) -> None:
    changes = SMALL | VARIANTS[variant] | FP8 | more
    trainer = build(changes, recompute)
    assert trainer.model.config.recompute_granularity == RECOMPUTE[recompute]["recompute_granularity"]
    check_foreign_routes(trainer, build(changes), order, drops="capacity" in variant)
    assert calls, "Megatron-core recomputes otherwise"
