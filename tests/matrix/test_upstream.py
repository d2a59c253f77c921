"""RouterReplay and topk_routing_with_score_function as Megatron-core 0.19 has them, on any release.

What upstream's own six tests ask is asked here, and what they leave out. And a training loop written against
them and nothing else: its witness is npu_replay's own replay of the same routes, in a model without the flag
and without recompute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

import fused_kernel
import npu_replay
import upstream_loop
from dealt_cases import dealt
from fused_kernel import FUSION
from npu_replay import RoutedExperts
from upstream_loop import FLAG, Schedule, UpstreamApi, all_forwards_first, upstream_api
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

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

ROWS = 4
EXPERTS = 6
FOREIGN = torch.tensor([[5, 0], [1, 4], [3, 2], [0, 2]])
"""Ids that are not the top two of these scores, and in no order."""


@pytest.fixture
def api() -> Iterator[UpstreamApi]:
    with upstream_api() as looked_up:
        yield looked_up


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(4), requires_grad=True)


def at(values: torch.Tensor) -> torch.Tensor:
    return values.gather(1, FOREIGN)


@pytest.mark.capability("topk_function")
@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize(
    "groups", [{}, {"num_groups": 3, "group_topk": 1}, {"num_groups": 1, "group_topk": 1}], ids=str
)
def test_replay_shows_the_targets_own_scores(
    api: UpstreamApi, logits: torch.Tensor, groups: dict[str, Any], pre_softmax: bool
) -> None:
    """T33: the masked scores of a group that lost, minus infinity or zero, must not come through."""
    options = {"use_pre_softmax": pre_softmax, "score_function": "softmax"} | groups
    expected = at(logits.softmax(dim=-1)) if pre_softmax else at(logits).softmax(dim=-1)
    for grad in (True, False):  # a reentrant checkpoint runs its first pass without
        replay = api.new("REPLAY_FORWARD", FOREIGN)
        with torch.set_grad_enabled(grad):
            probs, routing_map = api.topk_routing(logits, 2, router_replay=replay, **options)
        assert torch.equal(routing_map, torch.zeros(ROWS, EXPERTS).scatter(1, FOREIGN, 1).bool())
        assert torch.equal(at(probs), expected)


@pytest.mark.capability("module")
def test_replay_data_goes_to_the_instances_in_order_and_comes_back(api: UpstreamApi) -> None:
    first = api.new()
    second = api.new()
    api.replay.set_replay_data([FOREIGN, FOREIGN + 1])
    assert torch.equal(first.target_topk_idx, FOREIGN)
    assert torch.equal(second.target_topk_idx, FOREIGN + 1)
    first.record_indices(FOREIGN)
    second.record_indices(FOREIGN * 2)
    ours, others = api.replay.get_recorded_data()
    assert torch.equal(ours, FOREIGN)
    assert torch.equal(others, FOREIGN * 2)
    api.replay.clear_global_indices()
    assert api.replay.get_recorded_data() == [None, None]
    assert first.target_topk_idx is second.target_topk_idx is None
    assert first.replay_backward_list == second.replay_backward_list == []
    with pytest.raises(ValueError, match=r"\(3\).*\(2\)|Expected 2, got 3"):
        api.replay.set_replay_data([FOREIGN] * 3)


@pytest.mark.capability("module")
def test_the_module_its_actions_and_its_list_of_all_are_upstreams(api: UpstreamApi) -> None:
    assert find_spec("megatron.core.transformer.moe.router_replay") is not None
    assert import_module("megatron.core.transformer.moe").router_replay.RouterReplay is api.replay
    assert {action.name: action.value for action in api.action} == {
        "RECORD": "record",
        "REPLAY_FORWARD": "replay_forward",
        "REPLAY_BACKWARD": "replay_backward",
    }
    pair = [api.new(), api.new()]
    assert api.replay.global_router_replay_instances == pair
    api.replay.set_global_router_replay_action(api.action.REPLAY_FORWARD)
    assert {instance.router_replay_action for instance in pair} == {api.action.REPLAY_FORWARD}
    api.replay.clear_global_router_replay_action()
    assert {instance.router_replay_action for instance in pair} == {None}
    api.replay.clear_global_router_replay_instances()
    assert api.replay.global_router_replay_instances == []


@pytest.mark.capability("topk_function")
@pytest.mark.parametrize("groups", [{}, {"num_groups": 3, "group_topk": 1}], ids=["no groups", "groups"])
def test_sigmoid_with_a_bias_weighs_by_the_unbiased_scores(
    api: UpstreamApi, logits: torch.Tensor, groups: dict[str, Any]
) -> None:
    bias = torch.tensor([3.0, -3.0, 1.0, -1.0, 2.0, 0.0])
    settings: dict[str, Any] = {"score_function": "sigmoid", "expert_bias": bias, "scaling_factor": 2.5}
    settings |= groups
    record = api.new("RECORD")
    api.topk_routing(logits, 2, router_replay=record, **settings)
    if not groups:
        biased = (logits.sigmoid() + bias).topk(2, dim=1).indices
        assert torch.equal(record.get_recorded_indices().sort(dim=1).values, biased.sort(dim=1).values)
    replay = api.new("REPLAY_FORWARD", FOREIGN)
    probs, _ = api.topk_routing(logits, 2, router_replay=replay, **settings)
    scores = at(logits.sigmoid())
    torch.testing.assert_close(at(probs), 2.5 * scores / scores.sum(dim=-1, keepdim=True))


@pytest.mark.capability("layer_number")
def test_an_instance_knows_its_routers_layer(api: UpstreamApi) -> None:
    if not hasattr(api.new(), "layer_number"):
        pytest.skip("this release's own RouterReplay has no layer_number, and is left as it is")
    api.replay.clear_global_router_replay_instances()
    model = build({"moe_layer_freq": [0, 1, 0, 1]} | FLAG).model
    assert [instance.layer_number for instance in api.replay.global_router_replay_instances] == [2, 4]
    router = model.decoder.layers[3].mlp.router
    router.set_layer_number(9)
    assert router.router_replay.layer_number == 9


@pytest.mark.capability("router_replay")
@pytest.mark.parametrize("flagged", [True, False])
def test_each_router_of_a_flagged_config_has_an_instance_in_order(api: UpstreamApi, flagged: bool) -> None:
    model = build({"moe_layer_freq": [0, 1, 1, 1]} | (FLAG if flagged else {})).model
    instances = [router.module.router_replay for router in routers(model)]
    assert instances == (api.replay.global_router_replay_instances if flagged else [None] * 3)
    assert len(instances) == 3


# A training loop

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


@pytest.mark.capability("upstream_model")
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


FOREIGN_TO = ["softmax_after_topk", "groups_sigmoid_bias", "one_group", "capacity_probs"]


@pytest.mark.capability("upstream_model")
@pytest.mark.parametrize(
    ("variant", "schedule"), [case[:2] for case in dealt(FOREIGN_TO, SCHEDULES, [None])], ids=_named
)
def test_backward_replays_several_micro_batches_first_in_first_out(
    api: UpstreamApi, variant: str, schedule: Schedule
) -> None:
    """Foreign routes, another for each micro-batch: the wrong one's gradients are others."""
    trainer = build(VARIANTS[variant] | FLAG, "full")
    check_foreign_routes(trainer, build(VARIANTS[variant]), schedule)


@pytest.mark.capability("upstream_model")
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
    assert same(upstream_loop.replay(trainer, [layers(routes) for routes in foreign], schedule), expected)
