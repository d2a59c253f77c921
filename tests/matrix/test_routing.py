"""record and replay on the Megatron-core on the path: ways to route, to recompute, orders of backward.

And routing that isn't a plain top-k: fused, sinkhorn, forced balance, quantiles; what aux losses count; and
padding_mask.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

import fused_kernel
import npu_replay
from dealt_cases import dealt
from fused_kernel import FUSION
from npu_replay import RoutedExperts
from npu_replay.smoke import megatron_model
from zoo.gpt import (
    ALL_RECOMPUTE,
    BATCH,
    LENGTH,
    SIGMOID_BIAS,
    VARIANTS,
    Trainer,
    build,
    check_foreign_routes,
    perturbed,
    random_routes,
    routers,
    same,
)

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("megatron"),
    # torch says so of a reentrant checkpoint inside another's first pass, which runs under no_grad
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]

EXPERTS = 8
FULL_OR_NONE = [case[0] for case in dealt([None, "full"], [None], [None])]
Kernel = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def has_field(name: str) -> bool:
    config = import_module("megatron.core.transformer.transformer_config").TransformerConfig
    return name in {field.name for field in dataclasses.fields(config)}


def foreign_to(trainer: Trainer) -> list[RoutedExperts]:
    with npu_replay.record(trainer.model) as recording:
        trainer.run("each")
    return random_routes(recording.routes)


# A plain top-k

ORDERS = ["each", "sum", "reversed", "thread"]
AXES = (list(VARIANTS), [None, *ALL_RECOMPUTE], ORDERS)


def _case(variant: str, recompute: str | None, order: str) -> Any:
    shows = ["blocks", *(["recompute"] if recompute else []), *(["order"] if order != "each" else [])]
    marks = [pytest.mark.capability(name) for name in shows]
    return pytest.param(variant, recompute, order, marks=marks, id=f"{variant}-{recompute}-{order}")


@pytest.mark.parametrize(("variant", "recompute", "order"), [_case(*case) for case in dealt(*AXES)])
def test_a_record_changes_nothing_and_every_recompute_replays_its_own_forward(
    variant: str, recompute: str | None, order: str
) -> None:
    trainer = build(VARIANTS[variant], recompute)
    check_foreign_routes(trainer, build(VARIANTS[variant]), order, drops="capacity" in variant)


# The fused router


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    """In the place of Transformer Engine's; its choice is one that no top-k makes."""
    with fused_kernel.lent(fused_kernel.contrary):
        yield fused_kernel.contrary


@pytest.mark.capability("fused")
@pytest.mark.parametrize("recompute", FULL_OR_NONE)
def test_what_a_fused_router_chose_is_recorded(kernel: Kernel, recompute: str | None) -> None:
    trainer = build(FUSION, recompute)
    untouched = trainer.run("sum")
    with npu_replay.observe(trainer.model) as seen:
        trainer.run("sum")
    with npu_replay.record(trainer.model) as recording:
        losses, grads = trainer.run("sum")
    assert losses == untouched[0]
    for ours, theirs in zip(grads, untouched[1], strict=True):
        torch.testing.assert_close(ours, theirs)
    assert npu_replay.compare(recording.routes, seen.shown).differing == 0


@pytest.mark.capability("fused")
@pytest.mark.parametrize(
    ("recompute", "variant"),
    [
        case[:2]
        for case in dealt(
            [None, "full", "selective_moe"], ["softmax_after_topk", "groups_sigmoid_bias"], [None]
        )
    ],
)
def test_a_fused_router_replays_as_an_unfused_one(
    kernel: Kernel, variant: str, recompute: str | None
) -> None:
    plain = build(VARIANTS[variant])
    foreign = foreign_to(plain)
    with npu_replay.replay(plain.model, foreign):
        expected = plain.run("sum")
    trainer = build(VARIANTS[variant] | FUSION, recompute)
    with npu_replay.replay(trainer.model, foreign):
        assert same(trainer.run("sum"), expected)
    assert fused_kernel.product().fused_topk_with_score_function is kernel


# Other ways to choose


@pytest.mark.capability("force_balance")
def test_forced_balance_draws_other_experts_each_time_and_replay_doesnt() -> None:
    if not has_field("moe_router_force_load_balancing"):
        pytest.skip("this release has no moe_router_force_load_balancing")
    trainer = build({"moe_router_force_load_balancing": True})
    with npu_replay.record(trainer.model) as recording:
        trainer.run("each")
    with npu_replay.observe(trainer.model) as live:
        trainer.run("each")
    with npu_replay.observe(trainer.model) as seen, npu_replay.replay(trainer.model, recording.routes):
        trainer.run("each")
    assert npu_replay.compare(live.shown, recording.routes).differing > 0
    assert npu_replay.compare(seen.shown, recording.routes).differing == 0


def _balanced(kind: str, recomputes: list[str | None]) -> list[Any]:
    marks = pytest.mark.capability(kind.removesuffix("_balancing"))
    return [pytest.param(kind, recompute, marks=marks) for recompute in recomputes]


SOME = [case[0] for case in dealt([None, "full", "layers_non_reentrant"], [None], [None])]


@pytest.mark.parametrize(
    ("kind", "recompute"), [*_balanced("sinkhorn", SOME), *_balanced("quantile_balancing", FULL_OR_NONE)]
)
def test_a_balance_of_another_kind_is_recorded_and_replayed(kind: str, recompute: str | None) -> None:
    """Quantile balancing's dual update has a top-k of its own, down the rows, which is none of ours."""
    if kind == "quantile_balancing" and not has_field("moe_router_quantile_balancing_ema"):
        pytest.skip("this release has no quantile balancing")
    balance = {"moe_router_load_balancing_type": kind}
    check_foreign_routes(build(balance, recompute), build(balance), "sum")


# What aux losses count


@pytest.mark.capability("aux_loss")
@pytest.mark.parametrize("counted", ["live", "replayed"])
@pytest.mark.parametrize("recompute", FULL_OR_NONE)
def test_an_aux_loss_counts_what_it_was_asked_to(counted: str, recompute: str | None) -> None:
    """In the last layer's router weight, beside the gradient of the same replay without aux loss."""
    coefficient = 0.1
    with_aux = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": coefficient}
    foreign = foreign_to(build({}))[:1]
    total, _ = _last_weight(build(with_aux, recompute), foreign, aux_loss=counted)
    without, hidden = _last_weight(build({}, recompute), foreign)
    weight = routers(build({}).model)[-1].module.weight.detach().clone().requires_grad_()
    scores = (hidden @ weight.t()).softmax(dim=-1)
    ids = foreign[0].layer_ids(3).long() if counted == "replayed" else scores.topk(2, dim=1).indices
    counts = ids.flatten().bincount(minlength=EXPERTS)
    rows = hidden.shape[0]
    loss = coefficient * EXPERTS / (2 * rows * rows) * (counts * scores.sum(dim=0)).sum()
    (expected,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(total - without, expected, rtol=1e-3, atol=1e-6)


def _last_weight(
    trainer: Trainer, routes: list[RoutedExperts], **asked: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the last router's weight after one replayed micro-batch, and that router's input."""
    inputs: list[torch.Tensor] = []
    router = routers(trainer.model)[-1].module
    handle = router.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    with npu_replay.replay(trainer.model, routes, **asked):
        trainer.loss(trainer.batches[0]).backward()
    handle.remove()
    return router.weight.grad.clone(), inputs[0].flatten(0, 1)


@pytest.mark.capability("aux_loss")
@pytest.mark.parametrize("kind", [case[0] for case in dealt(["aux_loss", "seq_aux_loss"], [None], [None])])
def test_left_out_an_aux_loss_counts_the_live_experts(kind: str) -> None:
    changes = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.1}
    foreign = foreign_to(build(changes))
    results = {}
    for asked in ({}, {"aux_loss": "live"}, {"aux_loss": "replayed"}):
        trainer = build(changes, "full")
        with perturbed(trainer.model), npu_replay.replay(trainer.model, foreign, **asked):
            results[str(asked)] = trainer.run("sum")
    left_out, live, replayed = results.values()
    assert same(left_out, live)
    assert not same(left_out, replayed)


# padding_mask, where the release's routers take one: in a record, in its replay, and in the expert bias

LOSSES: dict[str, Any] = {
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 1e-1,
    "moe_z_loss_coeff": 1e-1,
}
PADDED = torch.arange(LENGTH).expand(BATCH, LENGTH) >= torch.tensor([[LENGTH], [LENGTH - 5]])
"""bool [batch, length], True where a token is padding: the last five of the second sequence."""


@pytest.fixture
def takes_masks(megatron: None) -> None:
    routing = import_module("megatron.core.transformer.moe.router").TopKRouter.routing
    if "padding_mask" not in inspect.signature(routing).parameters:
        pytest.skip("this release's routers take no padding_mask")


def step(trainer: Trainer, mask: torch.Tensor | None = PADDED) -> list[torch.Tensor]:
    """The loss of one micro-batch and the gradients of its routers."""
    trainer.model.zero_grad()
    tokens = trainer.batches[0]
    padding = {} if mask is None else {"padding_mask": mask}
    inputs = megatron_model.causal(tokens) | padding
    loss = trainer.model(input_ids=tokens, labels=tokens.roll(-1, 1), **inputs).mean()
    loss.backward()
    return [loss.detach(), *(router.module.weight.grad.clone() for router in routers(trainer.model))]


@pytest.mark.usefixtures("takes_masks")
@pytest.mark.capability("padding_mask")
@pytest.mark.parametrize("recompute", [None, "full"])
def test_a_mask_means_the_same_in_a_record_and_in_its_replay(recompute: str | None) -> None:
    trainer = build(LOSSES, recompute)
    untouched = step(trainer)
    assert not same(untouched, step(trainer, mask=None)), "this mask should matter"
    with npu_replay.record(trainer.model) as recording:
        recorded = step(trainer)
    assert same(recorded, untouched)
    for asked in ("live", "replayed"):
        with npu_replay.replay(trainer.model, recording.routes, aux_loss=asked):  # type: ignore[arg-type]
            assert same(step(trainer), untouched)


@pytest.mark.usefixtures("takes_masks")
@pytest.mark.capability("bias_mask")
@pytest.mark.parametrize("recompute", [None, "full"])
def test_padding_is_not_counted_for_the_expert_bias(recompute: str | None) -> None:
    """T24d: a mask [rows] over a map [rows, experts] is spread along the wrong side, or not at all."""
    trainer = build(SIGMOID_BIAS, recompute)
    modules = [router.module for router in routers(trainer.model)]
    with npu_replay.record(trainer.model) as recording:
        trainer.loss(trainer.batches[0])
    foreign = random_routes(recording.routes)[0]
    for router in modules:
        router.local_tokens_per_expert.zero_()
    with npu_replay.replay(trainer.model, [foreign]):
        step(trainer)
    kept = ~PADDED.t().flatten()  # the router's rows are sequence-major
    for number, router in enumerate(modules):
        ids = foreign.layer_ids(number).long()[kept]
        assert router.local_tokens_per_expert.tolist() == ids.flatten().bincount(minlength=8).tolist()
