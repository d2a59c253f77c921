"""record, replay and pin_recompute on real Megatron-core; each variant and recompute: tests/matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fused_kernel
import npu_replay
from fused_kernel import FUSION
from npu_replay import RoutedExperts
from npu_replay.errors import NoEffect, RecomputeError, RouterError
from npu_replay.routers import as_map
from npu_replay.seam import dropped
from npu_replay.smoke import megatron_model
from zoo.gpt import (
    BATCH,
    DEVICE,
    LENGTH,
    MICRO_BATCHES,
    VARIANTS,
    Trainer,
    build,
    hooks,
    perturbed,
    random_routes,
    routers,
    same,
)
from zoo.outcome import check_own_record

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("megatron"),
    # torch says so of a reentrant checkpoint inside another's first pass, which runs under no_grad
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]

ROWS = BATCH * LENGTH


def recorded(trainer: Trainer, order: str = "each") -> list[RoutedExperts]:
    with npu_replay.record(trainer.model) as recording:
        trainer.run(order)
    return recording.routes


@pytest.mark.slow
@pytest.mark.choice
@pytest.mark.parametrize("recompute", [None, "full", "layers_non_reentrant"])
@pytest.mark.parametrize("variant", ["capacity_probs", "capacity_padded", "capacity_position"])
def test_a_replay_of_a_recording_drops_the_tokens_that_were_dropped(
    variant: str, recompute: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """After a step, in the recomputes, too. Routes that don't say who was dropped have one WARNING."""
    dropped.warn.cache_clear()
    trainer = build(VARIANTS[variant], recompute)
    calls: list[torch.Tensor] = []  # of one router: forwards, then their recomputes from the last on
    routers(trainer.model)[1].module.register_forward_hook(
        lambda _, __, output: calls.append(output[0].detach() != 0)
    )
    with npu_replay.observe(trainer.model) as before:
        routes = recorded(trainer, "sum")
    by_position = variant == "capacity_position"
    chosen = [RoutedExperts(ids=part.ids, layers=part.layers, num_experts=8) for part in routes]
    assert npu_replay.compare(routes, before.shown).differing == 0
    assert npu_replay.compare([part.only([2]) for part in routes], before.shown).differing == 0
    assert npu_replay.compare(chosen, before.shown).differing > 0
    for replayed, same_tokens in ((routes, True), (chosen, by_position)):
        assert "drops tokens by their live probabilities" not in caplog.text
        calls.clear()
        replay = npu_replay.replay(trainer.model, replayed)
        with perturbed(trainer.model), npu_replay.observe(trainer.model) as shown, replay as session:
            trainer.run("sum")
        apart = npu_replay.compare(before.shown, shown.shown)
        assert apart.token_layers == 4 * ROWS * MICRO_BATCHES
        assert (apart.differing == 0) == same_tokens
        assert 0 < session.metrics()["capacity_dropped"] < 0.5
        if recompute is not None:
            assert all(map(torch.equal, calls, calls[::-1]))
    with perturbed(trainer.model), npu_replay.replay(trainer.model, chosen):
        trainer.run()
    assert caplog.text.count("drops tokens by their live probabilities") == int(not by_position)


def test_quantile_balancing_over_the_tokens_of_several_ranks_is_refused() -> None:
    model = build({}).model
    ranks = [1]
    for layer in model.decoder.layers:
        layer.mlp.router.routing_type = "quantile_balancing"
        layer.mlp.router.tp_cp_group = SimpleNamespace(size=lambda: ranks[0])
    assert len(routers(model)) == 4
    ranks[0] = 2
    with pytest.raises(RouterError, match=r"decoder.layers.0.mlp.router.*got 2 ranks"):
        routers(model)


def test_a_graph_around_the_router_is_refused_and_one_around_the_attention_is_not() -> None:
    """S1: a captured graph runs no hook, so it is refused before the first forward. Configs are as built."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    known = {field.name for field in fields(TransformerConfig)}
    new = "cuda_graph_impl" in known
    engine = {"cuda_graph_impl": "transformer_engine"} if new else {"external_cuda_graph": True}
    scope = "cuda_graph_modules" if "cuda_graph_modules" in known else "cuda_graph_scope"
    assert len(routers(build({**engine, scope: "attn"}).model)) == 4
    router = "decoder.layers.0.mlp.router"
    refused = rf"{router}.*captured in a graph.*{next(iter(engine))}.*{scope}=full"
    with pytest.raises(RouterError, match=refused):
        build(engine)
    if scope == "cuda_graph_modules":
        with pytest.raises(RouterError, match="cuda_graph_modules=moe_router"):
            build({**engine, scope: "moe_router"})
    # Megatron's own graphs hold whole layers, whatever their scope; without a GPU it makes none.
    model = build({}).model
    flag, value = ("cuda_graph_impl", "local") if new else ("enable_cuda_graph", True)
    for layer in model.decoder.layers:
        vars(layer.mlp.router.config).update({flag: value, scope: "attn"})
    with pytest.raises(RouterError, match=rf"{router}.*captured in a graph.*{flag}"):
        npu_replay.record(model).__enter__()
    assert hooks(model) == 0


def test_combined_1f1b_is_refused_before_the_first_micro_batch() -> None:
    trainer = build({})
    trainer.model.config.overlap_moe_expert_parallel_comm = True
    for block in (npu_replay.record(trainer.model), npu_replay.pin_recompute(trainer.model)):
        with (
            pytest.raises(RouterError, match=r"past the model's __call__.*overlap_moe_expert_parallel_comm"),
            block,
        ):
            pytest.fail("entered")
    assert hooks(trainer.model) == 0


@pytest.mark.slow
@pytest.mark.first_release
def test_two_live_models_of_one_config_object_keep_their_own_routes() -> None:
    """T18: an actor and its reference share the config; what is asked of it means neither of them alone."""
    actor = build({"moe_layer_freq": [0, 1, 1, 1]}, "full")
    reference = Trainer(megatron_model.model(actor.model.config).to(DEVICE), None)
    untouched = reference.run("sum")
    with npu_replay.record(actor.model) as recording, npu_replay.record(reference.model) as beside:
        actor.run("sum")
        assert same(reference.run("sum"), untouched)
    assert [len(session.routes) for session in (recording, beside)] == [MICRO_BATCHES] * 2
    assert recording.routes != beside.routes
    foreign = random_routes(recording.routes)
    with npu_replay.replay(actor.model, foreign), npu_replay.observe(actor.model) as seen:
        with npu_replay.replay(reference.model, beside.routes):
            assert same(reference.run("sum"), untouched)
        actor.run("sum")
    assert npu_replay.compare(seen.shown, foreign).differing == 0


@pytest.mark.first_release
@pytest.mark.parametrize(
    ("of", "name", "value", "found"),
    [
        ("router", "topk", 1, {"topk": 1}),
        ("router", "num_experts", 4, {"num_experts": 4}),
        ("router", "layer_number", 9, {"layer": 8}),
        ("config", "moe_expert_capacity_factor", 2.0, {"drops": True}),
        ("config", "moe_router_group_topk", 2, {"masks": True}),
        ("config", "moe_router_fusion", True, {}),
        ("config", "num_layers", 7, {"depth": 7}),
    ],
)
def test_a_router_that_is_found_again_is_described_anew(
    of: str, name: str, value: Any, found: dict[str, Any]
) -> None:
    model = build({}).model
    before = routers(model)[-1]
    setattr(before.module if of == "router" else before.module.config, name, value)
    after = routers(model)[-1]
    assert {key: getattr(after, key) for key in found} == found
    assert bool(after.bypass) == (name == "moe_router_fusion")
    assert after.module is before.module


class LoRATopKRouter(nn.Module):
    """As Megatron-Bridge's: it calls the router that it wraps piece by piece, never the router itself."""

    def __init__(self, to_wrap: Any) -> None:
        super().__init__()
        self.to_wrap = to_wrap
        self.adapter = nn.Linear(to_wrap.config.hidden_size, to_wrap.num_experts, bias=False)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        jittered = self.to_wrap.apply_input_jitter(hidden)
        return self.to_wrap.routing(self.to_wrap.gating(jittered) + self.adapter(jittered), *args, **kwargs)


@pytest.mark.parametrize("recompute", [None, "full"])
def test_a_router_with_an_adapter_that_calls_it_in_parts_is_replayed(recompute: str | None) -> None:
    trainer = build({}, recompute)
    for layer in trainer.model.decoder.layers:
        layer.mlp.router = LoRATopKRouter(layer.mlp.router)
    assert [router.label for router in routers(trainer.model)] == [0, 1, 2, 3]
    foreign = random_routes(check_own_record(trainer.model, partial(trainer.run, "each")))
    with npu_replay.observe(trainer.model) as seen, npu_replay.replay(trainer.model, foreign, min_overlap=0):
        trainer.run("each")
    assert npu_replay.compare(seen.shown, foreign).differing == 0


def test_an_expert_that_a_routers_own_gating_rules_out_is_refused() -> None:
    """Stock routers mask by groups alone; a subclass may mask in its own way."""
    trainer = build({})
    routes = recorded(trainer)
    assert any((batch.ids == 0).any() for batch in routes), "nobody chose the expert that is pruned"
    for layer in trainer.model.decoder.layers:
        layer.mlp.router.__class__ = pruned(type(layer.mlp.router))
    words = "has a weight that was made from a mask's number"
    with pytest.raises(NoEffect, match=words), npu_replay.replay(trainer.model, routes, min_overlap=0):
        trainer.run("each")


def pruned(kind: Any) -> Any:
    """The class of a router that never chooses expert 0."""

    def gating(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        logits = kind.gating(self, hidden)
        return torch.where(torch.arange(logits.shape[-1]) == 0, float("-inf"), logits)

    return type("Pruned", (kind,), {"gating": gating})


def test_replayed_experts_of_probability_zero_are_found_by_the_flex_dispatcher() -> None:
    """DeepEP is given the top-k of the probabilities, so those of the routes may not be exactly 0."""
    trainer = build({})
    probabilities: list[torch.Tensor] = []
    for router in routers(trainer.model):
        router.module.config.moe_token_dispatcher_type = "flex"
        router.module.weight.data *= 300
        router.module.register_forward_hook(lambda _, __, output: probabilities.append(output[0]))
    foreign = random_routes(recorded(trainer))
    probabilities.clear()
    with npu_replay.replay(trainer.model, foreign, min_overlap=0):
        trainer.run("each")
    calls = [routes.layer_ids(layer) for routes in foreign for layer in routes.layers]
    for ids, shown in zip(calls, probabilities, strict=True):
        assert torch.equal(shown.topk(ids.shape[1]).indices.sort().values, ids.long().sort().values)
    assert any(((shown > 0) & (shown < 1e-30)).any() for shown in probabilities), "none had become 0"


def test_ids_in_the_place_of_a_map_are_read_as_ids() -> None:
    """As Megatron's router returns them in its own inference, from 0.18 on."""
    router = routers(build({}).model)[0]
    ids = torch.tensor([[7, 3], [3, 0]])
    assert router.shows is not None
    assert router.shows((torch.ones(2, 2), ids)) is ids
    routing_map = torch.eye(2, router.num_experts)
    assert torch.equal(router.shows((routing_map, routing_map)), routing_map.bool())
    assert as_map(torch.tensor([[1, -1], [3, 2]]), 3).tolist() == [[False, True, False], [False, False, True]]


# What goes wrong with the fused router. That it is recorded and replayed, on every release: tests/matrix


@pytest.fixture
def kernel() -> Iterator[Any]:
    with fused_kernel.lent() as moe_utils:
        yield moe_utils


def test_a_recompute_that_falls_the_other_way_is_an_error(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """T35: the kernel can't be given the ids of its forward, so it is watched."""
    trainer = build(FUSION, "full")

    def drifting(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        scale = -1.0 if torch._C._current_graph_task_id() != -1 else 1.0
        return fused_kernel.fused_topk_with_score_function(logits * scale, *args, **kwargs)

    monkeypatch.setattr(kernel, "fused_topk_with_score_function", drifting)
    with (
        pytest.raises(RecomputeError, match=r"other experts in a recompute.*moe_router_fusion=False"),
        npu_replay.pin_recompute(trainer.model),
    ):
        trainer.run("each")
    assert kernel.fused_topk_with_score_function is drifting


def test_a_kernel_of_another_kind_is_an_error_that_says_so(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = build(FUSION)
    monkeypatch.setattr(kernel, "fused_topk_with_score_function", lambda logits, **_: logits)
    with pytest.raises(NoEffect, match="output can't be read"), npu_replay.record(trainer.model):
        trainer.loss(trainer.batches[0])


def test_a_fused_path_of_somebody_elses_is_refused_in_the_first_micro_batch(
    kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.moe import router as product

    def elsewhere(logits: torch.Tensor, topk: int, **_: Any) -> Any:
        return fused_kernel.fused_topk_with_score_function(
            logits, topk, False, None, None, None, "softmax", None
        )

    trainer = build(FUSION)
    monkeypatch.setattr(product, "topk_routing_with_score_function", elsewhere)
    with (
        pytest.raises(NoEffect, match=r"moe_router_fusion=True, and a kernel other than"),
        npu_replay.record(trainer.model),
    ):
        trainer.loss(trainer.batches[0])
