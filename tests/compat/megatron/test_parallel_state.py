"""ParallelLayout and DecoderLayers against Megatron-core: its own split of the layers, its parallel state."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import npu_replay
from npu_replay import ParallelLayout, ReplayError
from npu_replay.compat.megatron import parallel_state as megatron_layout
from npu_replay.devices import pick
from npu_replay.errors import RouterError
from npu_replay.module_tree import ModuleTree
from npu_replay.routers import find
from npu_replay.smoke import megatron_model
from zoo.gpt import at_stage

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

DEVICE = pick("auto")
AXES = {
    "tp": "tensor_model_parallel",
    "cp": "context_parallel",
    "pp": "pipeline_model_parallel",
    "ep": "expert_model_parallel",
    "etp": "expert_tensor_parallel",
    "dp": "data_parallel",
}
Stages = dict[tuple[int, int], tuple[int, ...]]
"""(pipeline rank, virtual stage) -> its decoder layers."""


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make this process that pipeline rank, as far as asking goes."""
    return functools.partial(at_stage, monkeypatch)


def takes(function: Callable[..., Any], **values: Any) -> dict[str, Any]:
    """Those of `values` that this release's function takes."""
    names = inspect.signature(function).parameters
    return {name: value for name, value in values.items() if name in names}


def megatrons_stages(config: Any, at: Callable[..., None]) -> Stages:
    """The layers of every stage and virtual stage, as Megatron's own functions have them."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    pp = config.pipeline_model_parallel_size
    vp = config.virtual_pipeline_model_parallel_size
    stages: Stages = {}
    for pp_rank, vp_rank in product(range(pp), range(vp or 1)):
        place = {"vp_stage": None if vp is None else vp_rank, "pp_rank": pp_rank}
        at(pp, pp_rank, vp, place["vp_stage"])
        count = get_num_layers_to_build(config, **takes(get_num_layers_to_build, **place))
        first = get_transformer_layer_offset(config, **takes(get_transformer_layer_offset, **place))
        stages[pp_rank, vp_rank] = tuple(range(first, first + count))
    return stages


def our_stages(config: Any) -> Stages:
    decoder = megatron_layout.decoder_layers(config)
    pp = config.pipeline_model_parallel_size
    vp = config.virtual_pipeline_model_parallel_size or 1
    return {
        (pp_rank, vp_rank): decoder.stage(pp, vp, pp_rank, vp_rank)
        for pp_rank, vp_rank in product(range(pp), range(vp))
    }


def once_each(stages: Stages, count: int) -> bool:
    return sorted(layer for layers in stages.values() for layer in layers) == list(range(count))


def has_wrong_offsets() -> bool:
    """The offset of Megatron-core 0.12 and 0.13 takes rank 0 for an uneven first stage."""
    from megatron.core.transformer import transformer_layer

    source = inspect.getsource(transformer_layer.get_transformer_layer_offset)
    return "(pipeline_rank - 1)" in source


def pipeline(pp: int, vp: int | None = None, **changes: Any) -> Any:
    """A config for a pipeline; None if Megatron doesn't take it."""
    try:
        return megatron_model.config(
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=vp,
            pipeline_dtype=torch.float32,
            **changes,
        )
    except (AssertionError, NotImplementedError, ValueError, ZeroDivisionError):
        return None


def grid() -> Iterator[Any]:
    ends = [
        {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
        for first, last in product((None, 1, 2, 3, 4), repeat=2)
    ]
    counted = [
        {"account_for_embedding_in_pipeline_split": embedding, "account_for_loss_in_pipeline_split": loss}
        for embedding, loss in ((True, False), (False, True), (True, True))
    ]
    for count, pp, vp, split in product(range(1, 13), range(1, 5), (None, 2, 3), ends + counted):
        if pp > 1 or (vp is None and split == ends[0]):
            config = pipeline(pp, vp, num_layers=count, **split)
            if config is not None:
                yield config


# Which decoder layers


def test_layers_are_on_the_stages_where_megatron_puts_them(at: Callable[..., None]) -> None:
    """T3, T40: all (virtual) stages of every pipeline that Megatron takes, asked as this release is asked."""
    same = refused = wrong = 0
    for config in grid():
        try:
            theirs = megatrons_stages(config, at)
        except (AssertionError, ZeroDivisionError):
            continue  # Megatron refuses it when it builds the model
        if once_each(theirs, config.num_layers):
            assert our_stages(config) == theirs, config
            same += 1
        elif (
            has_wrong_offsets()
            and config.virtual_pipeline_model_parallel_size is not None
            and config.num_layers_in_first_pipeline_stage is None
            and config.num_layers_in_last_pipeline_stage is not None
        ):
            wrong += 1  # T3: layers are given twice, and a model built so is refused below
        else:
            # Stages that don't add up to the model's layers, which Megatron builds all the same.
            with pytest.raises(ReplayError, match=r"dealt out evenly|leave layers over"):
                our_stages(config)
            refused += 1
    assert same > 400
    assert refused > 50
    assert (wrong > 10) == has_wrong_offsets()


TABLES = [
    ("Et|tt|tL", 3, {}),
    ("Et|tt|ttt|tL", 2, {}),
    ("Et|tt|tm|L", 4, {"mtp_num_layers": 1}),
    ([["embedding", "decoder"], ["decoder"] * 3, ["decoder", "loss"]], 3, {}),
]


@pytest.mark.parametrize(("table", "pp", "more"), TABLES)
def test_a_pipeline_layout_is_read_as_megatron_reads_it(
    at: Callable[..., None], table: str | list[list[str]], pp: int, more: dict[str, Any]
) -> None:
    """T3, T25: layers by table, and multi-token prediction in it is no decoder layer."""
    if "pipeline_model_parallel_layout" not in inspect.signature(type(megatron_model.config())).parameters:
        pytest.skip("this Megatron has no pipeline_model_parallel_layout")
    count = sum(stage.count("t") + stage.count("decoder") for stage in table)
    config = pipeline(pp, pipeline_model_parallel_layout=table, num_layers=count, **more)
    if config is None:
        assert more, "only where the multi-token prediction stands is a matter of the release"
        pytest.skip("this Megatron wants multi-token prediction elsewhere")
    theirs = megatrons_stages(config, at)
    assert once_each(theirs, count)
    assert our_stages(config) == theirs


# Models built as stages


def build_stage(config: Any, pp_rank: int, at: Callable[..., None]) -> list[nn.Module]:
    """The chunks of one pipeline rank, of real layers, built as Megatron's training builds them."""
    vp = config.virtual_pipeline_model_parallel_size
    at(config.pipeline_model_parallel_size, pp_rank, vp, None if vp is None else 0)
    return megatron_model.chunks(config)


def test_from_megatron_refuses_a_model_that_megatron_numbered_wrongly(at: Callable[..., None]) -> None:
    """T3: 0.12 and 0.13 give layers twice for virtual stages with num_layers_in_last_pipeline_stage alone."""
    config = pipeline(2, 2, num_layers=4, num_layers_in_last_pipeline_stage=2)
    chunks = build_stage(config, 1, at)
    if has_wrong_offsets():
        message = (
            r"pipeline rank 1 of 2, 2 virtual stages.*other decoder layers than its config says.*"
            r"Expected \[1, 3\], got \[0, 2\].*num_layers_in_last_pipeline_stage"
        )
        with pytest.raises(RouterError, match=message):
            ParallelLayout.from_megatron(chunks)
    else:
        assert ParallelLayout.from_megatron(chunks).moe_layers == (1, 3)


def test_only_a_stage_that_is_dense_by_its_config_may_have_no_router(at: Callable[..., None]) -> None:
    """T25, T43: not one whose routers are hidden; and multi-token prediction makes no stage an MoE stage."""
    config = pipeline(2, num_layers=4, moe_layer_freq=[0, 0, 1, 1])
    (dense,), (mixed,) = (build_stage(config, rank, at) for rank in range(2))
    at(2, 0)
    assert megatron_layout.is_dense_stage([ModuleTree.of(dense)])
    wrapped = Wrapper(dense)
    assert megatron_layout.is_dense_stage([ModuleTree.of(wrapped)])
    assert not megatron_layout.is_dense_stage([ModuleTree.of(dense.embedding)])
    dense.mtp = nn.ModuleList([mixed.decoder.layers[0]])
    assert megatron_layout.is_dense_stage([ModuleTree.of(dense)])
    at(2, 1)
    for layer in mixed.decoder.layers:
        layer.mlp = nn.Identity()
    with pytest.raises(RouterError, match="no router in this model"):
        npu_replay.record(mixed).__enter__()
    at(1, 0)
    alone = megatron_model.model(megatron_model.config(moe_layer_freq=[0, 0, 0, 0]))
    assert not megatron_layout.is_dense_stage([ModuleTree.of(alone)])


# The parallel state


class Wrapper(nn.Module):
    """As DDP or FSDP wrap a model: in `module`, without a config of their own."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def megatrons_wrappers(model: nn.Module, config: Any) -> nn.Module:
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    inner = Float16Module(config, model)
    return DistributedDataParallel(config, DistributedDataParallelConfig(), inner)


WRAPPED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "the model": lambda model, config: model,
    "a module list": lambda model, config: nn.ModuleList([model]),
    "wrapped twice in a tuple": lambda model, config: (Wrapper(Wrapper(model)),),
    "DistributedDataParallel and Float16Module": megatrons_wrappers,
    "the config": lambda model, config: config,
}


@pytest.mark.parametrize("how", WRAPPED)
def test_from_megatron_reads_a_model_however_it_is_wrapped(how: str) -> None:
    config = megatron_model.config(moe_layer_freq=[0, 1, 1, 0], bf16="Float16Module" in how)
    layout = ParallelLayout.from_megatron(WRAPPED[how](megatron_model.model(config).to(DEVICE), config))
    assert (layout.moe_layers, layout.layers) == ((1, 2), (0, 1, 2, 3))


def test_every_axis_is_read_from_its_own_place(
    monkeypatch: pytest.MonkeyPatch, at: Callable[..., None]
) -> None:
    """No axis is taken for another: expert tensor parallelism for tensor parallelism, say."""
    from megatron.core import parallel_state

    config = megatron_model.config()
    alone = ParallelLayout.from_megatron(config)
    assert (alone.tp, alone.pp, alone.dp, alone.sequence_parallel) == (1, 1, 1, False)
    assert [group.size() for group in alone.groups] == [1, 1]
    at(2, 1, 3, 0)
    assert ParallelLayout.from_megatron(config).vp == 3
    groups = {name: object() for name in ("tensor_and_context_parallel", "pipeline_model_parallel")}
    answers: dict[str, Any] = {f"get_{name}_group": group for name, group in groups.items()}
    for number, name in enumerate(AXES.values()):
        answers |= {f"get_{name}_world_size": 10 + number, f"get_{name}_rank": number + 1}
    for name, value in answers.items():
        monkeypatch.setattr(parallel_state, name, lambda *_, value=value, **__: value)
    layout = ParallelLayout.from_megatron(config)
    assert [getattr(layout, axis) for axis in AXES] == [*range(10, 16)]
    assert [getattr(layout, f"{axis}_rank") for axis in AXES] == [*range(1, 7)]
    assert layout.groups == tuple(groups.values()), "those that share a stage, then the stages"


@pytest.mark.parametrize("dispatcher", ["allgather", "alltoall", "alltoall_seq"])
def test_alltoall_seq_routers_see_the_rows_of_the_whole_group(dispatcher: str) -> None:
    """T46: of the dispatchers, this one alone gathers the logits before the top-k."""
    config = megatron_model.config(moe_token_dispatcher_type=dispatcher)
    config.sequence_parallel = True
    layout = ParallelLayout.from_megatron(config)
    assert layout.gathers_rows == (dispatcher == "alltoall_seq")
    assert layout.sequence_parallel


def test_what_cant_be_read_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core import parallel_state

    with pytest.raises(ReplayError, match=r"no Megatron config.*got Linear"):
        ParallelLayout.from_megatron(nn.Linear(2, 2))
    with monkeypatch.context() as patch, pytest.raises(ReplayError, match=r"isn't initialised"):
        patch.setattr(parallel_state, "model_parallel_is_initialized", lambda: False)
        ParallelLayout.from_megatron(megatron_model.config())
    monkeypatch.delitem(sys.modules, "megatron.core.parallel_state")  # on the driver there is none
    with pytest.raises(ReplayError, match=r"isn't running in this process.*ParallelLayout\(tp="):
        ParallelLayout.from_megatron(megatron_model.config())


# A vision-language model, whose decoder is not at its top: the decoder's routers are the ones that count.
# T47: who takes `getattr(chunk, "decoder", chunk)` takes the whole of such a model, with the layers of
# multi-token prediction inside its language model and of the vision tower beside it, all numbered from 1.


class VisionLanguage(nn.Module):
    """Megatron's own parts, put together as LLaVA's are; no `decoder`, and no `mtp`, at the top."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.config = megatron_model.config(**changes)
        self.vision_model = Tower()
        self.language_model = megatron_model.model(self.config)
        self.language_model.mtp = nn.ModuleList([megatron_model.model(self.config).decoder.layers[-1]])
        for layer in self.language_model.mtp:
            layer.layer_number = 1
            layer.mlp.set_layer_number(1)


class Tower(nn.Module):
    """A dense transformer of more layers than the decoder, which vision models call their decoder, too."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        dense: dict[str, Any] = {"num_moe_experts": None, "moe_ffn_hidden_size": None, "num_layers": 6}
        self.config = megatron_model.config(**(dense | changes))
        self.decoder = megatron_model.model(self.config).decoder


@pytest.mark.parametrize("freq", [1, [0, 1, 1, 1]])
def test_the_decoders_routers_are_found_with_their_own_numbers(freq: int | list[int]) -> None:
    labels = range(4) if freq == 1 else range(1, 4)
    assert [(router.path, router.label) for router in find([VisionLanguage(moe_layer_freq=freq)])[0]] == [
        (f"language_model.decoder.layers.{label}.mlp.router", label) for label in labels
    ]


def test_a_tower_that_routes_too_is_refused_by_its_number() -> None:
    model = VisionLanguage()
    model.vision_model = Tower(num_moe_experts=4, moe_ffn_hidden_size=32)
    with pytest.raises(RouterError, match=r"same decoder layer.*a second tower") as error:
        find([model])
    assert "vision_model.decoder.layers.0.mlp.router" in str(error.value)
    assert "language_model.decoder.layers.0.mlp.router" in str(error.value)


def test_the_towers_layers_are_not_taken_for_those_of_a_missing_chunk(at: Callable[..., None]) -> None:
    """Both chunks of a rank with two virtual stages: four decoder layers in all, the tower in the first."""
    chunks = [VisionLanguage(num_layers=2), VisionLanguage(num_layers=2)]
    layers = [layer for chunk in chunks for layer in chunk.language_model.decoder.layers]
    for number, layer in enumerate(layers):
        layer.layer_number = number + 1
        layer.mlp.set_layer_number(number + 1)
    del chunks[1].vision_model
    for chunk in chunks:
        vars(chunk.config).update(num_layers=4, virtual_pipeline_model_parallel_size=2)
    at(1, 0, 2)
    assert [len(routers) for routers in find(chunks)] == [2, 2]
    with pytest.raises(
        RouterError, match=r"isn't all that this rank has.*got 1 with decoder layers \[0, 1\]"
    ):
        find(chunks[:1])
