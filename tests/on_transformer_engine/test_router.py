"""moe_router_fusion with a kernel of small operators, which calls a top-k.

A kernel that calls none: tests/compat/megatron/test_fused_router.py, and tests/matrix on every release.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformer_engine.pytorch import router as product

import fused_kernel
import npu_replay
from fused_kernel import FUSION
from zoo.gpt import CAPACITY, SIGMOID_BIAS, VARIANTS, build, perturbed, random_routes, same

pytestmark = pytest.mark.usefixtures("megatron")

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


def test_megatron_takes_the_router_of_transformer_engine() -> None:
    moe_utils = fused_kernel.product()
    assert moe_utils.fused_topk_with_score_function is KERNELS["small operators"]


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


@pytest.mark.parametrize("counted", ["live", "replayed"])
def test_an_aux_loss_of_the_fused_functions_counts_what_it_was_asked_to(counted: Any) -> None:
    changes = SMALL | VARIANTS["aux_loss"] | {"moe_aux_loss_coeff": 0.1}
    plain = build(changes)
    fused = build(changes | FUSION, "full")
    with npu_replay.record(plain.model) as chosen:
        plain.run("sum")
    foreign = random_routes(chosen.routes)
    grads = {}
    for asked, trainer in {"plain": plain, "fused": fused}.items():
        with perturbed(trainer.model), npu_replay.replay(trainer.model, foreign, aux_loss=counted):
            grads[asked] = trainer.run("sum")[1]
    for ours, theirs in zip(grads["fused"], grads["plain"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
