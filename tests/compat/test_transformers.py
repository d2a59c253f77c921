"""Real transformers models, small and random: recording changes nothing, replay repeats it all.

What is the session's, whatever the model (copies, inference mode, selective checkpoints), is in
tests/sessions; each family with each checkpoint, and the table of families in docs/models.md, on every
release of transformers, in tests/matrix.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel
from transformers.models.qwen3_moe import modeling_qwen3_moe as stock

import npu_replay
from npu_replay import RoutedExperts, routers
from npu_replay.errors import NoEffect, RouterError
from zoo import qwen, qwen_vl
from zoo.hugging_face import (
    FAMILIES,
    SIZES,
    batches,
    build,
    train,
)
from zoo.outcome import check_own_record, random_routes


def perturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for router in routers.find([model])[0]:
            for weight in router.module.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator))


IMPLEMENTATIONS = ("eager", "grouped_mm", "batched_mm")
GROUPS = ({"n_group": 1, "topk_group": 1}, {}, {"topk_group": 4, "num_experts_per_tok": 4})
"""One group holds all experts; and the top-k that ranks groups looks much like the routing's own."""
WAYS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    **{f"{groups}": ("deepseek_v3-4-groups", None, groups) for groups in GROUPS},
    **{way: ("qwen3_moe", "non-reentrant", {}) for way in ("bf16", "autocast", *IMPLEMENTATIONS)},
    "aux loss": ("mixtral", "non-reentrant", {"output_router_logits": True, "router_aux_loss_coef": 0.1}),
}


@pytest.mark.slow
@pytest.mark.choice
@pytest.mark.parametrize("way", WAYS)
def test_a_record_changes_nothing_its_replay_repeats_it_and_other_routers_follow_it_s1_s2(way: str) -> None:
    family, recompute, changes = WAYS[way]
    model: Any = build(family, recompute, **changes)
    if way == "bf16":
        model.to(torch.bfloat16)
    if way in IMPLEMENTATIONS:
        model.set_experts_implementation(way)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast", cache_enabled=False):
        routes = check_own_record(model, partial(train, model))
        perturb(model)
        with npu_replay.observe(model) as live:
            train(model)
        with npu_replay.observe(model) as seen, npu_replay.replay(model, routes):
            results = train(model)
    assert [len(part) for part in routes] == [10, 12, 14, 16, 18]
    assert {part.layers for part in routes} == {FAMILIES[family][2]}
    assert npu_replay.compare(live.shown, routes).differing > 0
    assert npu_replay.compare(seen.shown, routes).differing == 0
    assert all(result is None or result.isfinite().all() for result in results)


# Weights and groups


def test_dense_layers_keep_their_place_in_the_labels_t2_t3() -> None:
    model = build("deepseek_v3-1-group", num_hidden_layers=5, first_k_dense_replace=3)
    for part in (model, model.model):  # the decoder alone has shorter paths
        assert [router.label for router in routers.find([part])[0]] == [3, 4]
    with pytest.raises(RouterError, match="no router in this model"):
        build("qwen3_moe", mlp_only_layers=[0, 1, 2])


def beside_a_deeper_tower() -> nn.Module:
    tower = AutoModel.from_config(AutoConfig.for_model("qwen2", **SIZES | {"num_hidden_layers": 6}))
    return nn.ModuleDict({"tower": tower, "language_model": build("qwen3_moe")})


@pytest.mark.parametrize(
    ("made", "layers", "got"),
    [
        (lambda: build("qwen3_moe"), 4, "got layers up to 3"),
        (lambda: build("qwen3_moe"), 1, r"got \[0\]"),
        (beside_a_deeper_tower, 4, "got layers up to 3"),
    ],
    ids=["deeper", "flatter", "deeper, as a tower is"],
)
def test_routes_of_a_model_of_another_depth_are_refused_with_both_depths(
    made: Any, layers: int, got: str
) -> None:
    (routes,) = random_routes([10], range(layers), 8, 2, seed=3)
    with pytest.raises(RouterError, match=f"of a model of 3 decoder layers, {got}"):
        npu_replay.replay(made(), [routes]).__enter__()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_that_counts_its_layers_anew_has_the_labels_of_the_whole_model(family: str) -> None:
    model: Any = build(family)
    first, *others = routers.find([model])[0]
    holder: Any = model.get_submodule(first.path.split(".layers.")[0])
    holder.layers = nn.ModuleList(list(holder.layers)[1:])
    labels = [router.label for router in (first, *others) if router.label > 0]
    assert [router.label for router in routers.find([model])[0]] == labels
    model.config.num_hidden_layers = 2  # a pruned model, whose list has all layers
    assert [router.label for router in routers.find([model])[0]] == [label - 1 for label in labels]


# What is not a router, and what is refused


REMOTE = """
import torch
from torch import nn

class MoEGate(nn.Module):
    def __init__(self):
        super().__init__()
        # LongCat's have experts that compute nothing, which the first number leaves out
        self.top_k, self.num_experts, self.n_routed_experts = 2, 6, 8
        self.weight = nn.Parameter(torch.randn(8, 16))

    def forward(self, hidden):
        scores = (hidden.reshape(-1, 16) @ self.weight.T).softmax(-1)
        weights, ids = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)
        return ids, weights

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = MoEGate()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(8))

    def forward(self, hidden):
        ids, weights = self.gate(hidden)
        flat = hidden.reshape(-1, 16)
        every = torch.stack([expert(flat) for expert in self.experts], dim=1)
        chosen = every.gather(1, ids[..., None].expand(-1, -1, 16))
        return hidden + (chosen * weights[..., None]).sum(1).reshape(hidden.shape)

class InlineBlock(Block):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(16, 8, bias=False)
        self.top_k, self.num_experts = 2, 8

class Model(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.layers = nn.ModuleList([nn.Identity(), block])

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden
"""


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A module as the hub's loader makes one for code that came with a checkpoint."""
    module = types.ModuleType("transformers_modules.someone.modeling_some")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(REMOTE, module.__name__, "exec"), vars(module))
    return module


def test_routers_in_code_that_came_with_a_checkpoint_are_replayed(remote: types.ModuleType) -> None:
    model = remote.Model(remote.Block())
    hidden = torch.randn(2, 5, 16)
    with npu_replay.record(model) as recording:
        before = model(hidden)
    assert recording.routes[0].layers == (1,)
    with npu_replay.replay(model, recording.routes):
        assert torch.equal(model(hidden), before)
    perturb(model)
    with npu_replay.replay(model, recording.routes):
        after = model(hidden)
    assert not torch.equal(after, model(hidden))


def test_a_block_that_chooses_inside_itself_is_refused_by_name_t36(remote: types.ModuleType) -> None:
    """Most families in transformers 4. In some layers alone: below."""
    with pytest.raises(RouterError) as caught, npu_replay.record(remote.Model(remote.InlineBlock())):
        pass
    assert caught.value.where == "layers.1"
    assert caught.value.problem.startswith("InlineBlock can't be replayed")
    assert "transformers 4" in caught.value.cause
    assert "upgrade" in caught.value.cause


def test_experts_that_a_kernel_calls_past_the_router_are_an_error_t36() -> None:
    """A kernel from the hub takes the place of the block's forward and calls no router."""
    for family, skipped in (("qwen3_moe", lambda hidden: hidden), ("gpt_oss", lambda hidden: (hidden, None))):
        model = build(family)
        model.model.layers[2].mlp.forward = skipped
        refused = pytest.raises(NoEffect, match=r"layer 2 .*the router was not called")
        with refused as caught, npu_replay.record(model):
            train(model)
        for word in ("use_kernels", "Mxfp4Config(dequantize=True)"):
            assert word in caught.value.cause


# Classes that are written anew, as Unsloth's compiler does, in `unsloth_compiled_module_<family>`. Here that
# is done by hand, as by its release 2026.10.9 for Qwen3-MoE: the router's forward may be compiled.

ROUTER = "Qwen3MoeTopKRouter"
BLOCK = "Qwen3MoeSparseMoeBlock"


def written_anew(name: str, classes: list[str]) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update({key: value for key, value in vars(stock).items() if not key.startswith("__")})
    for class_name in classes:
        exec(compile(inspect.getsource(getattr(stock, class_name)), name, "exec"), vars(made))
    return made


has_routers = pytest.mark.skipif(
    not hasattr(stock, ROUTER), reason="transformers 4 has no class of the router"
)


@pytest.fixture(params=[[ROUTER], [ROUTER, BLOCK, "compiled"]], ids="-".join)
def unsloth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    classes = [class_name for class_name in request.param if class_name != "compiled"]
    made: Any = written_anew("unsloth_compiled_module_qwen3_moe", classes)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    for class_name in classes:
        monkeypatch.setattr(stock, class_name, getattr(made, class_name))
    if "compiled" in request.param:
        router = getattr(made, ROUTER)
        router.forward = torch.compile(router.forward, fullgraph=True, backend="eager")
    yield
    torch.compiler.reset()


@has_routers
@pytest.mark.usefixtures("unsloth")
def test_routers_that_were_written_anew_are_recorded_observed_and_replayed() -> None:
    made = qwen.make(vocabulary=64, layers=3)
    tokens = torch.randint(0, 64, (2, 10))
    with torch.no_grad(), npu_replay.record(made) as recording:
        made(tokens)
    assert recording.routes[0].layers == (0, 1, 2)
    perturb(made)
    with npu_replay.observe(made) as live:
        made(tokens)
    with npu_replay.observe(made) as seen, npu_replay.replay(made, recording.routes):
        made(tokens).logits.sum().backward()
    assert npu_replay.compare(recording.routes, live.shown).router_mismatch > 0
    assert npu_replay.compare(recording.routes, seen.shown).router_mismatch == 0


@has_routers
def test_half_of_a_model_is_never_taken_for_it_all() -> None:
    """Whoever writes classes anew under a name that nobody knows, in some layers alone."""
    made = qwen.make(vocabulary=64, layers=3)
    other = written_anew("somebodys_compiler", [ROUTER, BLOCK])
    for layer in (0, 2):
        made.model.layers[layer].mlp = vars(other)[BLOCK](made.config)
    for opens in (npu_replay.record, npu_replay.observe, npu_replay.pin_recompute):
        with pytest.raises(RouterError) as caught, opens(made):  # type: ignore[attr-defined]
            pass
        assert caught.value.where == "model.layers.0.mlp"
        assert "somebodys_compiler.Qwen3MoeSparseMoeBlock" in str(caught.value)


# Aux losses: transformers takes a top-k of the routers' logits itself

AUX = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "gpt_oss")
LOGITS = {"output_router_logits": True}
LIVE = r"can't count replayed experts.*aux_loss='live'.*output_router_logits"


def recorded(model: nn.Module, **call: Any) -> list[RoutedExperts]:
    with torch.no_grad(), npu_replay.record(model) as recording:
        model(**call)
    return recording.routes


@pytest.mark.parametrize("family", AUX)
def test_a_loss_of_the_live_choice_is_refused_where_the_replayed_one_is_asked_for(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(family)
    call = {"input_ids": batches()[0]}
    routes = recorded(model, **call)
    asked = {} if family == "mixtral" else LOGITS
    model.config.output_router_logits = not asked
    with pytest.raises(RouterError, match=LIVE), npu_replay.replay(model, routes, aux_loss="replayed"):
        model(**call, **asked)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    with npu_replay.replay(model, routes, aux_loss="live"):
        assert model(**call, **asked).aux_loss is not None
    with npu_replay.replay(model, routes, aux_loss="replayed"):
        assert model(**call, output_router_logits=False).aux_loss is None
    monkeypatch.setenv("NPU_REPLAY_AUX_LOSS", "replayed")
    with npu_replay.observe(model), npu_replay.record(model):  # they ask for nothing
        assert model(**call, **asked).aux_loss is not None
    call["attention_mask"] = torch.ones_like(call["input_ids"])
    with npu_replay.follow(model) as following:
        with torch.no_grad():
            model(**call, output_router_logits=False)
        with pytest.raises(RouterError, match=LIVE):
            model(**call, **asked)
        model(**call, output_router_logits=False).logits.sum().backward()
    assert following.metrics()["replayed"] == len(call["input_ids"])


def test_a_positional_argument_counts() -> None:
    model = build("qwen3_moe")
    (ids, *_) = batches()
    others = [None] * (list(inspect.signature(model.forward).parameters).index("output_router_logits") - 1)
    replay = npu_replay.replay(model, recorded(model, input_ids=ids), aux_loss="replayed")
    with pytest.raises(RouterError, match=LIVE), replay:
        model(ids, *others, True)


def test_a_text_config_inside_says_it_for_the_whole_model() -> None:
    model = qwen_vl.make().train()
    call = {"input_ids": torch.randint(2, 100, (2, 8))}
    routes = recorded(model, **call)
    model.config.text_config.output_router_logits = True
    assert model(**call).aux_loss is not None
    with pytest.raises(RouterError, match=LIVE), npu_replay.replay(model, routes, aux_loss="replayed"):
        model(**call)
