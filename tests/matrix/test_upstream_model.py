"""A training loop written against Megatron-core's own replay API, and nothing else, on any release.

The witness is npu_replay's own replay of the same routes, in a model without the flag and without recompute.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import pytest
import torch

import fused_kernel
import npu_replay
import upstream_loop
from dealt_cases import dealt
from fused_kernel import FUSION
from npu_replay import RoutedExperts
from router_replay_api import FLAG, UpstreamApi
from upstream_loop import Schedule, all_forwards_first
from zoo.gpt import (
    MICRO_BATCHES,
    VARIANTS,
    Trainer,
    build,
    perturbed,
    random_routes,
    routers,
    same,
)

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.capability("upstream_model"),
]

Layers = list[torch.Tensor]
"""int64 [rows, topk] of each router, as RouterReplay has them."""

RECOMPUTE = [None, "full", "full_two_layers", "selective_moe"]
BALANCED = {
    kind: {
        "moe_router_load_balancing_type": kind,
        "moe_aux_loss_coeff": 0.0,
        "moe_router_score_function": "softmax",
    }
    for kind in ("sinkhorn", "quantile_balancing")
}
"""N2. Quantile balancing's top-k asks for one expert more than it uses, to find where the limit lies."""


def layers(routes: RoutedExperts) -> Layers:
    return [routes.layer_ids(layer).long() for layer in routes.layers]


def routes_of(trainer: Trainer, recorded: list[Layers]) -> list[RoutedExperts]:
    """What RouterReplay recorded, micro-batch by micro-batch."""
    labels = [router.label for router in routers(trainer.model)]
    return [RoutedExperts(ids=torch.stack(ids, dim=1), layers=labels, num_experts=8) for ids in recorded]


def one_by_one(forward: Callable[[int], None], backward: Callable[[int], None]) -> None:
    for number in range(MICRO_BATCHES):
        forward(number)
        backward(number)


def one_forward_ahead(forward: Callable[[int], None], backward: Callable[[int], None]) -> None:
    """As a stage of a pipeline before the last does under 1F1B."""
    forward(0)
    for number in range(1, MICRO_BATCHES):
        forward(number)
        backward(number - 1)
    backward(MICRO_BATCHES - 1)


SCHEDULES = [one_by_one, all_forwards_first, one_forward_ahead]


def _named(value: object) -> str:
    return str(getattr(value, "__name__", value))


@pytest.mark.parametrize(
    ("variant", "recompute", "schedule"),
    [
        *dealt(list(VARIANTS), RECOMPUTE, SCHEDULES),
        ("sinkhorn", "full", one_by_one),
        *dealt(["quantile_balancing"], [None, "full"], SCHEDULES),
    ],
    ids=_named,
)
def test_what_was_recorded_is_as_by_npu_replay_and_is_replayed_after_the_router_changed(
    api: UpstreamApi, variant: str, recompute: str | None, schedule: Schedule
) -> None:
    """The old log-probs' pass and the update: recompute too, by REPLAY_BACKWARD alone."""
    if variant == "quantile_balancing" and not hasattr(
        import_module("megatron.core.transformer.moe.moe_utils"), "qb_dual_update"
    ):
        pytest.skip("this Megatron-core has no quantile balancing: 0.19 is the first")
    changes = (VARIANTS | BALANCED)[variant]
    trainer = build(changes | FLAG, recompute)
    plain = build(changes)
    with npu_replay.record(plain.model) as recording, torch.no_grad():
        for tokens in plain.batches:
            plain.loss(tokens)
    _, targets = upstream_loop.record(trainer)
    routes = routes_of(trainer, targets)
    for ours, theirs in zip(recording.routes, routes, strict=True):  # before a capacity drops some
        assert torch.equal(ours.ids.sort(dim=2).values.long(), theirs.ids.sort(dim=2).values.long())
    with perturbed(trainer.model):
        losses, grads = upstream_loop.replay(trainer, targets, schedule)
    with perturbed(plain.model), npu_replay.replay(plain.model, routes):
        expected = plain.run("each")
    assert same((losses, grads), expected)


FOREIGN = ["softmax_after_topk", "groups_sigmoid_bias", "one_group", "capacity_probs"]


@pytest.mark.parametrize(
    ("variant", "schedule"), [case[:2] for case in dealt(FOREIGN, SCHEDULES, [None])], ids=_named
)
def test_backward_replays_several_micro_batches_first_in_first_out(
    api: UpstreamApi, variant: str, schedule: Schedule
) -> None:
    """Foreign routes, another for each micro-batch: the wrong one's gradients are others."""
    trainer = build(VARIANTS[variant] | FLAG, "full")
    check_foreign_routes(trainer, build(VARIANTS[variant]), schedule)


@pytest.mark.capability("upstream_fused")
def test_a_fused_router_is_recorded_and_replayed(api: UpstreamApi) -> None:
    """T45, N1: upstream itself does neither, and says nothing."""
    with fused_kernel.lent(fused_kernel.contrary):
        trainer = build(FLAG | FUSION, "full")
        with npu_replay.observe(trainer.model) as seen:
            trainer.run("each")
        _, recorded = upstream_loop.record(trainer)
        assert npu_replay.compare(routes_of(trainer, recorded), seen.shown).differing == 0
        check_foreign_routes(trainer, build({}), one_by_one)


def check_foreign_routes(trainer: Trainer, plain: Trainer, schedule: Schedule) -> None:
    with npu_replay.record(plain.model) as recording:
        plain.run("each")
    foreign = random_routes(recording.routes)
    with npu_replay.replay(plain.model, foreign):
        expected = plain.run("each")
    assert same(upstream_loop.replay(trainer, [layers(one) for one in foreign], schedule), expected)
