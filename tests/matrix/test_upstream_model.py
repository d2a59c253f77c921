"""A training loop written against Megatron-core's own replay API, and nothing else, on any release.

The witness is npu_replay's own replay of the same routes, in a model without the flag and without recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

import npu_replay
import upstream_loop
from dealt_cases import dealt
from npu_replay import RoutedExperts
from router_replay_api import FLAG, UpstreamApi, upstream_api
from upstream_loop import Schedule, all_forwards_first
from zoo.gpt import (
    MICRO_BATCHES,
    SIGMOID_BIAS,
    VARIANTS,
    Grads,
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


@pytest.fixture
def api() -> Iterator[UpstreamApi]:
    with upstream_api() as found:
        yield found


def flagged(variant: str, recompute: str | None = None) -> Trainer:
    return build(VARIANTS[variant] | FLAG, recompute)


def layers(routes: RoutedExperts) -> Layers:
    return [routes.layer_ids(layer).long() for layer in routes.layers]


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


def witness(variant: str, routes: Sequence[RoutedExperts]) -> tuple[list[float], Grads]:
    plain = build(VARIANTS[variant])
    with npu_replay.replay(plain.model, routes):
        return plain.run("each")


@pytest.mark.parametrize(
    ("variant", "recompute", "schedule"), dealt(list(VARIANTS), RECOMPUTE, SCHEDULES), ids=_named
)
def test_what_was_recorded_is_as_by_npu_replay_and_is_replayed_after_the_router_changed(
    api: UpstreamApi, variant: str, recompute: str | None, schedule: Schedule
) -> None:
    """The old log-probs' pass and the update: recompute too, by REPLAY_BACKWARD alone."""
    trainer = flagged(variant, recompute)
    plain = build(VARIANTS[variant])
    with npu_replay.record(plain.model) as recording, torch.no_grad():
        for tokens in plain.batches:
            plain.loss(tokens)
    _, targets = upstream_loop.record(trainer)
    for ours, theirs in zip(recording.routes, targets, strict=True):
        for ids, others in zip(layers(ours), theirs, strict=True):
            assert torch.equal(ids.sort(dim=1).values, others.sort(dim=1).values)
    with perturbed(trainer.model):
        losses, grads = upstream_loop.replay(trainer, targets, schedule)
    labels = [router.label for router in routers(trainer.model)]
    routes = [RoutedExperts(ids=torch.stack(ids, dim=1), layers=labels, num_experts=8) for ids in targets]
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
    trainer = flagged(variant, "full")
    plain = build(VARIANTS[variant])
    with npu_replay.record(plain.model) as recording:
        plain.run("each")
    foreign = random_routes(recording.routes)
    given = upstream_loop.replay(trainer, [layers(one) for one in foreign], schedule)
    assert same(given, witness(variant, foreign))


def test_without_an_action_a_flagged_model_is_any_other_and_works_with_npu_replays_own_blocks() -> None:
    """The flag alone is no obstacle; an action that is set is refused (compat/mindspeed/test_features.py)."""
    with upstream_api():
        trainer = flagged("sigmoid_bias_scaling", "full")
        untouched = build(SIGMOID_BIAS, "full").run("sum")
        with npu_replay.record(trainer.model) as recording:
            assert same(trainer.run("sum"), untouched)
        with npu_replay.replay(trainer.model, recording.routes):
            assert same(trainer.run("sum"), untouched)
