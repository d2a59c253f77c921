"""HybridModel (MambaModel up to 0.17) of real Megatron-core. An engine's rows in it: tests/matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import npu_replay
from npu_replay import ParallelLayout, ReplayError, TokenLayout
from npu_replay.compat.megatron import parallel_state as megatron_layout
from npu_replay.errors import RouterError
from npu_replay.module_tree import ModuleTree
from npu_replay.routers import find
from zoo import hybrid
from zoo.gpt import at_stage

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

TOKENS = 9


def needs(pattern: str) -> None:
    if why := hybrid.missing(pattern):
        pytest.skip(why)


def built(pattern: str, **changes: Any) -> Any:
    needs(pattern)
    return hybrid.model(hybrid.config(pattern, **changes), pattern)


def test_another_number_of_moe_layers_in_the_config_is_an_error_with_both() -> None:
    model = built("MEM*E-ME")
    config = {"num_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 5}
    rows = torch.rand(TOKENS - 1, 5, 8).topk(2).indices
    choice = {"prompt_token_ids": [1, 2, 3], "token_ids": [4] * (TOKENS - 3), "routed_experts": rows.tolist()}
    routes = npu_replay.from_vllm({"choices": [choice]}, npu_replay.RoutedModel.from_config(config))
    message = "Expected 3 MoE layers, one for each E.*got 5 MoE layers"
    with pytest.raises(RouterError, match=f"micro-batch 0: .*{message}"):
        npu_replay.replay(model, routes).__enter__()
    layers = ParallelLayout.from_megatron(model).moe_layers
    with pytest.raises(RouterError, match=message):
        TokenLayout.packed([TOKENS]).gather(routes, layers=layers)


# The layout


def test_from_megatron_reads_a_model_its_config_and_a_config_that_has_the_pattern() -> None:
    pattern = "MEM*E-ME"
    model = built(pattern)
    for given in (model, [model], model.config):
        layout = ParallelLayout.from_megatron(given)
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
    assert [ParallelLayout.from_megatron(one).moe_layers for one in both] == [(1,), (0,)]


def test_routers_of_multi_token_prediction_are_left_alone() -> None:
    model = built("*E*E/*E", mtp_num_layers=1)
    assert [router.label for router in find([model])[0]] == [0, 1]
    assert ParallelLayout.from_megatron(model).moe_layers == (0, 1)


def test_a_router_with_a_number_that_is_no_e_of_the_pattern_is_refused() -> None:
    model = built("*E*E")
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
        for old, new in ((dist.get_rank, group.rank), (dist.get_world_size, group.size)):
            fake = lambda g=None, *_, old=old, new=new: new() if g is group else old()  # noqa: E731
            monkeypatch.setattr(dist, old.__name__, fake)
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
    assert [router.label for router in find([built("*-*E").decoder])[0]] == [1]
    (chunk,) = stage("*E|*E", 2, 1)
    with pytest.raises(RouterError, match=r"pattern of the whole model isn't known.*model.decoder"):
        find([chunk.decoder])
