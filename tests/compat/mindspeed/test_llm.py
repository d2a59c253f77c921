"""MindSpeed-LLM's routing types through the seam, and which decoder layers it gives a router.

Each test runs on stand-ins that make the same calls, and on MindSpeed-LLM's own functions where its sources
and a Megatron-core that it fits are on the path.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import mindspeed_llm_routing as mindspeed
import npu_replay
from npu_replay import DecoderLayers, ParallelLayout, RoutedExperts
from npu_replay.compat.mindspeed import llm
from npu_replay.errors import NoEffect, RouterError
from npu_replay.smoke import megatron_model
from zoo import outcome
from zoo.gpt import (
    DEVICE,
    MICRO_BATCHES,
    RECOMPUTE,
    Trainer,
    check_foreign_routes,
    hooks,
    random_routes,
    routers,
)
from zoo.outcome import check_own_record, checkpointed, gradients

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

GROUPS: dict[str, Any] = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
EACH: dict[str, Any] = {"moe_router_num_groups": 8, "moe_router_group_topk": 2}
"""A top-k over the groups that looks like the one over the experts, and chooses the same."""
SCALED: dict[str, Any] = {"moe_router_topk_scaling_factor": 1.5}


@dataclass(frozen=True)
class Case:
    """A routing type, MindSpeed-LLM's arguments for it, and changes of the config."""

    kind: str
    args: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)


CASES = {
    "softmax_topk": Case("softmax_topk"),
    "softmax_topk_norm": Case("softmax_topk", {"norm_topk_prob": True, "moe_revert_type_after_topk": True}),
    "softmax_topk_bias": Case(
        "softmax_topk", config={"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    ),
    "gating_in_fp32": Case("softmax_topk", {"router_gating_in_fp32": True}),
    "greedy_scaled": Case("group_limited_greedy", GROUPS | SCALED, GROUPS),
    "greedy_norm": Case("group_limited_greedy", GROUPS | {"norm_topk_prob": True}, GROUPS),
    "greedy_losses": Case(
        "group_limited_greedy",
        GROUPS | SCALED | {"moe_device_level_aux_loss_coeff": 0.1, "moe_comm_aux_loss_coeff": 0.1},
        GROUPS | {"moe_aux_loss_coeff": 0.1},
    ),
    "as_many_groups_as_experts": Case("group_limited_greedy", EACH | SCALED, EACH),
    "pai": Case("pai_megatron_aux_loss", config={"moe_aux_loss_coeff": 0.1}),
    "aux_loss_norm": Case("aux_loss", {"norm_topk_prob": True}, {"moe_aux_loss_coeff": 0.1}),
    "none": Case("none"),
}
REAL_ONLY = {
    # Megatron's own functions, called by MindSpeed-LLM's routing
    "none_groups_bias": Case(
        "none",
        config=GROUPS | {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    ),
    "none_capacity": Case("none", config={"moe_expert_capacity_factor": 0.75}),
    "none_sqrtsoftplus": Case("none", {"n_hash_layers": 1}, {"moe_router_score_function": "sqrtsoftplus"}),
    "seq_aux_loss": Case("seq_aux_loss", config={"moe_aux_loss_coeff": 0.1}),
    "sinkhorn": Case("sinkhorn"),
}
SOURCES = ["stand_in", pytest.param("real", marks=pytest.mark.mindspeed)]


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest, megatron: None) -> Iterator[Any]:
    """MindSpeed-LLM's router module, or None for the stand-ins."""
    if request.param == "stand_in":
        yield None
    elif reason := mindspeed.missing():
        pytest.skip(reason)
    else:
        with mindspeed.real_router() as module:
            yield module


@pytest.fixture
def build(source: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    """A model whose routers are MindSpeed-LLM's, of one routing type."""

    def trainer(case: Case, recompute: str | None = None) -> Trainer:
        config = configured(case, monkeypatch, source, **RECOMPUTE.get(recompute or "", {}))
        torch.manual_seed(7)
        model = megatron_model.model(config).to(DEVICE)
        for module in model.modules():
            if isinstance(bias := getattr(module, "expert_bias", None), torch.Tensor):
                bias.copy_(torch.randn(bias.shape) * 0.1)
        return Trainer(model, None)

    return trainer


def configured(case: Case, patch: pytest.MonkeyPatch, source: Any, **changes: Any) -> Any:
    """A config as MindSpeed-LLM has it: with all its arguments, and values that Megatron wouldn't take."""
    args = mindspeed.bind(patch, source, **case.args)
    changes |= case.config
    odd = changes.get("moe_router_score_function") == "sqrtsoftplus"
    if odd:
        del changes["moe_router_score_function"]
    config = megatron_model.config(**changes)
    for name, value in vars(args).items():
        if not hasattr(config, name):
            setattr(config, name, value)
    config.moe_router_load_balancing_type = case.kind
    if odd:
        config.moe_router_score_function = "sqrtsoftplus"
    return config


class Tower(nn.Module):
    """Routers alone, one after the other, with experts that are one vector each."""

    def __init__(self, config: Any, *, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(7)
        layers = megatron_model.model(config).decoder.layers
        self.routers = nn.ModuleList(layer.mlp.router for layer in layers)
        for router in self.routers:
            if hasattr(router, "build_hash_module"):
                router.build_hash_module()
        self.experts = nn.Parameter(torch.randn(self.routers[0].num_experts, config.hidden_size))
        self.to(DEVICE)
        self.called = checkpointed(self.layer, reentrant=False) if recompute else self.layer

    def layer(self, hidden: torch.Tensor, *call: Any) -> torch.Tensor:
        router, *more = call
        probs = router(hidden, *more)[0]
        return hidden + torch.tanh(probs @ self.experts).view_as(hidden)

    def forward(self, hidden: torch.Tensor, *more: Any) -> torch.Tensor:
        for router in self.routers:
            hidden = self.called(hidden, router, *more)
        return hidden

    def run(self, hidden: torch.Tensor, *more: Any) -> tuple[list[float], list[torch.Tensor | None]]:
        self.zero_grad()
        loss = self(hidden, *more).square().mean()
        loss.backward()
        return [loss.item()], gradients(self)


HIDDEN = torch.randn(12, 2, 32, generator=torch.Generator().manual_seed(2)).to(DEVICE)
TOKENS = torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(4)).to(DEVICE)


@pytest.mark.slow
@pytest.mark.first_release
@pytest.mark.choice
@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("case", CASES | REAL_ONLY)
def test_a_routing_type_is_recorded_and_replayed(
    build: Callable[..., Trainer], source: Any, case: str, recompute: str | None
) -> None:
    if case in REAL_ONLY and source is None:
        pytest.skip("the stand-in has no routing type that calls Megatron's own functions")
    if "sqrtsoftplus" in case and not hasattr(source, "topk_softmax_with_capacity_and_hash"):
        pytest.skip("this MindSpeed-LLM has no sqrtsoftplus")
    chosen = (CASES | REAL_ONLY)[case]
    check_foreign_routes(build(chosen, recompute), build(chosen), "sum", drops="capacity" in case)


@pytest.mark.parametrize(
    "case",
    ["softmax_topk", "softmax_topk_norm", "greedy_scaled", "greedy_norm", "as_many_groups_as_experts", "pai"],
)
def test_a_replayed_expert_has_the_probability_that_its_score_gives_also_in_a_masked_group(
    build: Callable[..., Trainer], case: str
) -> None:
    trainer = build(CASES[case])
    with npu_replay.record(trainer.model) as recording:
        trainer.run()
    routes = random_routes(recording.routes)
    router = routers(trainer.model)[0].module
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    handle = router.register_forward_hook(lambda _, args, output: seen.append((args[0].detach(), output[0])))
    with npu_replay.replay(trainer.model, routes[:1]):
        trainer.loss(trainer.batches[0])
    handle.remove()
    (hidden, probs) = seen[0]
    ids = routes[0].layer_ids(0).long().to(DEVICE)
    scores = torch.softmax(hidden.reshape(len(ids), -1) @ router.weight.T, dim=-1)
    expected = scores.gather(1, ids)
    if "norm" in case:
        expected = expected / expected.sum(dim=1, keepdim=True)
    expected = expected * (1.5 if case in ("greedy_scaled", "as_many_groups_as_experts") else 1.0)
    torch.testing.assert_close(probs.gather(1, ids), expected)
    assert int((probs != 0).sum()) == ids.numel()
    if "greedy" in case:
        best = scores.view(len(ids), 4, 2).max(dim=-1).values.topk(2).indices
        assert bool((ids[:, :, None] // 2 != best[:, None, :]).all(dim=-1).any()), "none was masked"
    (gradient,) = torch.autograd.grad(probs.gather(1, ids)[:, 0].sum(), router.weight)
    assert float(gradient.abs().sum()) > 0


def in_flight(self: Any, logits: torch.Tensor, *_: Any) -> Any:
    """As pai_megatron_aux_loss with moe_permutation_async_comm: the map comes with a handle."""
    probs, routing_map = mindspeed.stand_in_routing(self, logits)
    return probs, (routing_map, "handle")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("sparsemixer_topk", r"layer 0.*never reached its top-k"),
        ("pai_megatron_aux_loss", r"output can't be read.*moe_permutation_async_comm"),
    ],
)
def test_a_routing_that_cannot_be_given_its_experts_is_an_error_in_the_first_micro_batch(
    monkeypatch: pytest.MonkeyPatch, kind: str, words: str
) -> None:
    """By a type without a top-k, or a map that is still under way."""
    tower = Tower(configured(Case(kind), monkeypatch, None))
    if kind == "pai_megatron_aux_loss":
        monkeypatch.setattr(type(tower.routers[0]), "routing", in_flight)
    for block in (npu_replay.record, npu_replay.pin_recompute):
        with pytest.raises(NoEffect, match=words), block(tower):
            tower(HIDDEN)
    assert hooks(tower) == 0


def test_a_router_that_megatron_routes_is_none_of_mindspeed_llms(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes by the function that runs: an installed or half-patched MindSpeed-LLM changes nothing."""
    from megatron.core.transformer.moe.router import TopKRouter

    router = Tower(megatron_model.config()).routers[0]
    router.routing_type = "sparsemixer_topk"
    assert not llm.routes(router)

    @wraps(mindspeed.stand_in_routing)
    def outer(*args: Any) -> Any:
        return mindspeed.stand_in_routing(*args)

    monkeypatch.setattr(mindspeed.stand_in_routing, "__module__", mindspeed.ROUTER)
    outer.__module__ = "somebody.else"
    monkeypatch.setattr(TopKRouter, "routing", outer)
    assert llm.routes(router)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_hash_layer_is_left_alone_and_the_others_are_replayed(
    source: Any, monkeypatch: pytest.MonkeyPatch, recompute: bool
) -> None:
    """The token decides there, in every pass alike; its routes may be among those that are given."""
    case = Case("none", {"n_hash_layers": 2}, {"moe_router_score_function": "sqrtsoftplus"})
    config = configured(case, monkeypatch, source)
    tower = Tower(config, recompute=recompute)
    if not hasattr(tower.routers[0], "hash"):
        pytest.skip("this MindSpeed-LLM has no hash layers")
    assert [llm.looks_up(router) for router in tower.routers] == [True, True, False, False]
    routes = check_own_record(tower, partial(tower.run, HIDDEN, TOKENS.t()))
    assert routes[0].layers == (2, 3)
    assert DecoderLayers(4, moe_layer_freq=llm.layer_kinds(config)).moe == (2, 3)
    ids = torch.rand(24, 4, 8, generator=torch.Generator().manual_seed(5)).topk(2).indices
    engine = RoutedExperts(ids=ids, layers=range(4), num_experts=8)
    with npu_replay.observe(tower) as shown, npu_replay.replay(tower, [engine]):
        tower.run(HIDDEN, TOKENS.t())
    assert npu_replay.compare(shown.shown[0], engine.only([2, 3])).differing == 0


@pytest.mark.parametrize(
    ("case", "experts", "results"),
    [
        (
            Case("softmax_topk", {"num_zero_experts": 4}),
            12,
            2,
        ),  # LongCat's: more columns than num_moe_experts
        (Case("aux_loss", {"use_global_aux_loss": True}), 8, 3),  # (probs, routing_map, logits)
    ],
    ids=["experts without weights", "logits"],
)
def test_more_experts_or_results_than_megatrons_are_replayed(
    source: Any, monkeypatch: pytest.MonkeyPatch, case: Case, experts: int, results: int
) -> None:
    tower = Tower(configured(case, monkeypatch, source))
    sizes = (tower.routers[0].weight.shape[0], len(tower.routers[0](HIDDEN)))
    if source is not None and sizes == (8, 2):
        pytest.skip("this MindSpeed-LLM has no such feature")
    assert sizes == (experts, results)
    run = partial(tower.run, HIDDEN)
    routes = check_own_record(tower, run)
    outcome.check_foreign_routes(tower, run, tower, run, random_routes(routes))
    assert routes[0].num_experts == experts


@pytest.mark.parametrize("noop", [None, {3}, {0, 5}])
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("first", [1, 2, 3, -1])
def test_dense_layers_are_those_that_mindspeed_llm_builds(
    first: int, every: int, noop: set[int] | None
) -> None:
    """By the condition that its block asks for each layer it builds."""
    built = [number for number in range(8) if number >= first and number % every == 0]
    config = SimpleNamespace(
        num_layers=8, first_k_dense_replace=first, moe_layer_freq=every, noop_layers=noop
    )
    moe_layers = DecoderLayers(8, moe_layer_freq=llm.layer_kinds(config)).moe
    assert [*moe_layers] == [number for number in built if number not in (noop or ())]


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"moe_layer_freq": 2}, 2),
        ({"moe_layer_freq": [0, 1, 1, 1]}, [0, 1, 1, 1]),
        ({"moe_layer_freq": None, "first_k_dense_replace": None, "noop_layers": None}, 1),
        ({"moe_layer_freq": [0, 1, 1, 1], "first_k_dense_replace": 2}, [0, 1, 1, 1]),
        ({"moe_layer_freq": [0, 1, 1, 1], "noop_layers": "2"}, [0, 1, 0, 1]),
        ({"moe_layer_freq": 1, "noop_layers": "0,3"}, [0, 1, 1, 0]),
        ({"moe_layer_freq": 1, "noop_layers": ""}, 1),
    ],
)
def test_megatrons_own_words_stay_and_noop_layers_have_no_router(
    config: dict[str, Any], kinds: object
) -> None:
    assert llm.layer_kinds(SimpleNamespace(num_layers=4, **config)) == kinds


def test_lists_of_layers_are_text_or_numbers() -> None:
    for counts in ("1,3", [1, 3]):
        decoder = DecoderLayers(4, table=llm.pipeline_table(SimpleNamespace(num_layer_list=counts)))
        assert [decoder.stage(2, 1, rank, 0) for rank in range(2)] == [(0,), (1, 2, 3)]
    assert llm.pipeline_table(SimpleNamespace(num_layer_list=None)) is None


class NoopTransformerLayer(nn.Module):
    """What MindSpeed puts in a layer's place: a number, and nothing that routes."""

    def __init__(self, layer_number: int) -> None:
        super().__init__()
        self.layer_number = layer_number

    def forward(self, hidden_states: torch.Tensor, *_: Any, context: Any = None, **__: Any) -> Any:
        return hidden_states.clone(), context


def test_a_parallel_layout_is_read_off_a_model_with_dense_first_and_noop_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The built model is the witness: `from_megatron` holds the layout's layers against its routers."""
    from megatron.core import parallel_state

    noops = SimpleNamespace(NoopTransformerLayer=NoopTransformerLayer)
    monkeypatch.setitem(sys.modules, "mindspeed.core.pipeline_parallel.noop_layers.adaptor", noops)
    config = megatron_model.config(num_layers=6, moe_layer_freq=[0, 0, 1, 1, 1, 1])
    model = megatron_model.model(config)
    model.decoder.layers[4] = NoopTransformerLayer(5)
    vars(config).update(moe_layer_freq=1, first_k_dense_replace=2, noop_layers={4})
    assert ParallelLayout.from_megatron(model).moe_layers == (2, 3, 5)
    config.first_k_dense_replace = 1
    with pytest.raises(RouterError, match="in other decoder layers than its config says"):
        ParallelLayout.from_megatron(model)
    # A stage of a dense and a noop layer is no missing router.
    trainer = Trainer(megatron_model.model(megatron_model.config(num_layers=2, moe_layer_freq=[0, 0])), None)
    trainer.model.to(DEVICE)
    trainer.model.decoder.layers[1] = NoopTransformerLayer(2)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 2)
    vars(trainer.model.config).update(
        num_layers=4, moe_layer_freq=1, first_k_dense_replace=1, noop_layers={1}
    )
    with npu_replay.record(trainer.model) as recording:
        trainer.run("each")
    assert [batch.layers for batch in recording.routes] == [()] * MICRO_BATCHES
