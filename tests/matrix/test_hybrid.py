"""HybridModel (MambaModel up to 0.17) on the Megatron-core on the path: an engine's rows, layouts, stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import npu_replay
from dealt_cases import dealt
from npu_replay import ParallelLayout, ReplayError, TokenLayout
from npu_replay.compat.megatron import parallel_state as megatron_layout
from npu_replay.errors import RouterError
from npu_replay.module_tree import ModuleTree
from npu_replay.routers import find
from zoo import hybrid
from zoo.gpt import DEVICE, VARIANTS, Trainer, at_stage, check_foreign_routes

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("megatron"),
    pytest.mark.capability("hybrid"),
]

PATTERNS = {
    # pattern: its Hugging Face config, and layer_number and decoder layer of each router
    "*-*E*E": ({"num_hidden_layers": 3, "first_k_dense_replace": 1}, {4: 1, 6: 2}),
    "MEM*E-ME": ({"num_hidden_layers": 8, "hybrid_override_pattern": "MEM*E-ME"}, {2: 1, 5: 4, 8: 7}),
}
ROWS = 9


def needs(pattern: str) -> None:
    if why := hybrid.missing(pattern):
        pytest.skip(why)


def model_of(pattern: str, **changes: Any) -> Any:
    needs(pattern)
    return hybrid.model(hybrid.config(pattern, **changes), pattern)


def built(pattern: str, *, again: bool = False, variant: str = "softmax_after_topk") -> Trainer:
    """The same weights at each call."""
    needs(pattern)  # before it is asked how to recompute
    torch.manual_seed(7)
    changes = VARIANTS[variant] | (hybrid.recompute() if again else {})
    return Trainer(model_of(pattern, **changes).to(DEVICE), None)


@pytest.mark.parametrize(
    ("variant", "pattern"),
    [
        case[:2]
        for case in dealt(["softmax_after_topk", "groups_sigmoid_bias", "aux_loss"], [*PATTERNS], [None])
    ],
)
def test_a_record_changes_nothing_and_every_recompute_replays_its_own_forward(
    pattern: str, variant: str
) -> None:
    trainer = built(pattern, again=True, variant=variant)
    check_foreign_routes(trainer, built(pattern, variant=variant), "sum")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_engines_rows_reach_the_routers_of_their_layers(pattern: str) -> None:
    """Megatron's numbers and the config's stand side by side in PATTERNS; hooks of this test's own look."""
    model = built(pattern).model
    config, layer_of = PATTERNS[pattern]
    tokens = torch.arange(ROWS).view(1, ROWS)
    engine = npu_replay.RoutedModel.from_config({"num_experts": 8, "num_experts_per_tok": 2, **config})
    rows = np.random.default_rng(0).random((ROWS - 1, len(engine.layers), 8)).argsort(-1)[..., :2]
    ids = tokens[0].tolist()
    choice = {"prompt_token_ids": ids[:3], "token_ids": ids[3:], "routed_experts": rows.tolist()}
    (routes,) = npu_replay.from_vllm({"choices": [choice | {"index": 0, "finish_reason": "length"}]}, engine)
    assert routes.layers == tuple(layer_of.values())
    shown: dict[int, torch.Tensor] = {}
    for layer in model.decoder.layers:
        if (router := getattr(getattr(layer, "mlp", None), "router", None)) is not None:
            router.register_forward_hook(
                lambda module, _, out: shown.update({module.layer_number: out[1].cpu()})
            )
    with npu_replay.replay(model, [routes]):
        Trainer(model, None).loss(tokens.to(DEVICE)).backward()
    assert list(shown) == list(layer_of)
    for column, routing_map in enumerate(shown.values()):
        experts = [row.nonzero()[:, 0].tolist() for row in routing_map[: ROWS - 1]]
        assert experts == np.sort(rows[:, column]).tolist()


def test_another_number_of_moe_layers_in_the_config_is_an_error_with_both() -> None:
    model = model_of("MEM*E-ME")
    config = {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 5}
    rows = torch.rand(ROWS - 1, 5, 8).topk(2).indices
    choice = {"prompt_token_ids": [1, 2, 3], "token_ids": [4] * (ROWS - 3), "routed_experts": rows.tolist()}
    routes = npu_replay.from_vllm({"choices": [choice]}, npu_replay.RoutedModel.from_config(config))
    message = "Expected 3 MoE layers, one for each E.*got 5 MoE layers"
    with pytest.raises(RouterError, match=f"micro-batch 0: .*{message}"):
        npu_replay.replay(model, routes).__enter__()
    layers = ParallelLayout.from_megatron(model).moe_layers
    with pytest.raises(RouterError, match=message):
        TokenLayout.packed([ROWS]).gather(routes, layers=layers)


# The layout


def test_from_megatron_reads_a_model_its_config_and_a_config_that_has_the_pattern() -> None:
    pattern = "MEM*E-ME"
    model = model_of(pattern)
    for form in (model, [model], model.config):
        layout = ParallelLayout.from_megatron(form)
        assert (layout.moe_layers, layout.layers) == ((1, 4, 7), tuple(range(8)))
    for name in ("hybrid_layer_pattern", "hybrid_override_pattern"):
        config = hybrid.config("*-*E")
        setattr(config, name, "*-*E")
        assert ParallelLayout.from_megatron(config).moe_layers == (1,)


def test_a_hybrid_config_without_a_pattern_or_with_several_is_refused() -> None:
    needs("E")
    config = hybrid.config("*-*E", is_hybrid_model=True)
    with pytest.raises(ReplayError, match=r"doesn't say which layers have experts.*from_megatron\(model\)"):
        ParallelLayout.from_megatron(config)
    both = [hybrid.model(config, pattern) for pattern in ("*-*E", "*E*-")]
    with pytest.raises(ReplayError, match=r"several patterns have this config.*\*-\*E.*\*E\*-"):
        ParallelLayout.from_megatron(config)
    assert [ParallelLayout.from_megatron(model).moe_layers for model in both] == [(1,), (0,)]


def test_routers_of_multi_token_prediction_are_left_alone() -> None:
    model = model_of("*E*E/*E", mtp_num_layers=1)
    assert [router.label for router in find([model])[0]] == [0, 1]
    assert ParallelLayout.from_megatron(model).moe_layers == (0, 1)


def test_a_router_with_a_number_that_is_no_e_of_the_pattern_is_refused() -> None:
    model = model_of("*E*E")
    model.decoder.layers[1].mlp.router.layer_number = 3
    with pytest.raises(
        RouterError, match=r"isn't that of an E.*Expected an E in '\*E\*E', got layer_number 3"
    ):
        find([model])


# Stages


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Builds the chunks of one pipeline rank, which this process then is as far as asking goes."""

    def build(pattern: str, pp: int, rank: int, vp: int | None = None, **changes: Any) -> list[Any]:
        needs(pattern)
        group = at_stage(monkeypatch, pp, rank, vp)
        for name, new in (("get_rank", group.rank), ("get_world_size", group.size)):
            old = getattr(dist, name)
            fake = lambda g=None, *_, old=old, new=new: new() if g is group else old()  # noqa: E731
            monkeypatch.setattr(dist, name, fake)
        config = hybrid.config(
            pattern,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vp,
            pipeline_dtype=torch.float32,
            **changes,
        )
        return hybrid.chunks(config, pattern)

    return build


def test_a_stage_without_e_is_taken_as_a_dense_stage(stage: Callable[..., list[Any]]) -> None:
    (chunk,) = stage("*-*-|*E*E", 2, 0)
    assert ParallelLayout.from_megatron(chunk).moe_layers == ()
    assert find([chunk]) == [[]]
    assert megatron_layout.is_dense_stage([ModuleTree.of(chunk)])
    assert not megatron_layout.is_dense_stage([ModuleTree.of(chunk.embedding)])
    (mixed,) = stage("*-*-|*E*E", 2, 1)
    for layer in mixed.decoder.layers:
        layer.mlp = torch.nn.Identity()
    with pytest.raises(RouterError, match="no router in this model"):
        find([mixed])


def test_some_virtual_stages_in_the_place_of_all_are_refused(stage: Callable[..., list[Any]]) -> None:
    chunks = stage("ME|M*|E-|ME", 2, 0, 2)
    assert ParallelLayout.from_megatron(chunks).chunk_layers == ((0, 1), (4, 5))
    assert [[router.label for router in each] for each in find(chunks)] == [[1], [4]]
    with pytest.raises(
        RouterError, match=r"isn't all that this rank has.*\[0, 1, 4, 5\].*got 1 .*model\[0\]"
    ):
        find(chunks[:1])


def test_the_decoder_alone_is_taken_where_it_is_the_whole_model(stage: Callable[..., list[Any]]) -> None:
    assert [router.label for router in find([model_of("*-*E").decoder])[0]] == [1]
    (chunk,) = stage("*E|*E", 2, 1)
    with pytest.raises(RouterError, match=r"pattern of the whole model isn't known.*model.decoder"):
        find([chunk.decoder])
