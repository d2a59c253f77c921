"""moe_router_fusion with a kernel of small operators, which calls a top-k; Transformer Engine's checkpoint.

A kernel that calls none: tests/compat/megatron/test_routers.py, and tests/matrix on every release.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch import router as product

import fused_kernel
import npu_replay
from fused_kernel import FUSION
from zoo.gpt import (
    CAPACITY,
    RECOMPUTE,
    SIGMOID_BIAS,
    VARIANTS,
    build,
    check_foreign_routes,
    random_routes,
    same,
)

pytestmark = [
    pytest.mark.usefixtures("megatron"),
    # torch says so of a reentrant checkpoint inside another's first pass, which runs under no_grad
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]

KERNELS = {
    "small operators": product.fused_topk_with_score_function,
    "in a Function": fused_kernel.in_function(product.fused_topk_with_score_function),
}
SMALL = {"num_layers": 2}
WIDE = SMALL | {"moe_router_topk": 4}
"""More than two numbers, whose sum depends on their order."""
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "softmax after": (WIDE, "full"),
    "softmax before": (WIDE | {"moe_router_pre_softmax": True}, None),
    "sigmoid, bias": (WIDE | SIGMOID_BIAS, "full"),
    "groups": (SMALL | VARIANTS["groups_softmax"], "selective_moe"),
    "groups, sigmoid, bias": (WIDE | VARIANTS["groups_sigmoid_bias"], "layers_non_reentrant"),
    "capacity": (SMALL | CAPACITY, "full_two_layers"),
}
DRIFTING = SIGMOID_BIAS | WIDE


@pytest.mark.parametrize("case", CASES)
def test_a_fused_router_is_recorded_as_it_runs_and_replayed_as_an_unfused_one(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    changes, recompute = CASES[case]
    plain = build(changes)
    with npu_replay.record(plain.model) as chosen:
        plain.run("sum")
    foreign = random_routes(chosen.routes)
    with npu_replay.replay(plain.model, foreign):
        expected = plain.run("sum")
    fused = build(changes | FUSION, recompute)
    for name, kernel in KERNELS.items():
        monkeypatch.setattr(fused_kernel.product(), "fused_topk_with_score_function", kernel)
        untouched = fused.run("sum")
        with npu_replay.record(fused.model) as recording:
            assert same(fused.run("sum"), untouched), name
        assert npu_replay.compare(recording.routes, chosen.routes).differing == 0, name
        with npu_replay.replay(fused.model, foreign):
            assert same(fused.run("sum"), expected), name
        with npu_replay.pin_recompute(fused.model):
            assert same(fused.run("sum"), untouched), name


@pytest.mark.parametrize("name", ["small operators", "in a Function"])
def test_a_recompute_that_falls_the_other_way_takes_the_experts_of_its_forward(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A kernel that calls no top-k can only be watched."""
    monkeypatch.setattr(fused_kernel.product(), "fused_topk_with_score_function", KERNELS[name])
    fused = build(DRIFTING | FUSION, "full")
    untouched = fused.run("sum")

    def drifting(expert_bias: torch.Tensor, **options: Any) -> Any:
        in_recompute = torch._C._current_graph_task_id() != -1
        bias = expert_bias.roll(1) if in_recompute else expert_bias
        return KERNELS[name](expert_bias=bias, **options)

    monkeypatch.setattr(fused_kernel.product(), "fused_topk_with_score_function", drifting)
    assert not same(fused.run("sum"), untouched)
    with npu_replay.pin_recompute(fused.model):
        assert same(fused.run("sum"), untouched)


# Its checkpoint: around layers and MoE layers, and as Megatron-core's own under FP8

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
