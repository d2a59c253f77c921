"""Reads Megatron-core's parallel state and pipeline split, of any release, as a ParallelLayout."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from npu_replay.compat.megatron import hybrid
from npu_replay.compat.mindspeed import llm
from npu_replay.errors import ReplayError, RouterError
from npu_replay.module_tree import ModuleTree
from npu_replay.parallel.parallel_layout import DecoderLayers, ParallelLayout
from npu_replay.routers import chunks_of

_STATE = "megatron.core.parallel_state"
_AXES = {
    # the name that the parallel state gives an axis
    "tp": "tensor_model_parallel",
    "cp": "context_parallel",
    "pp": "pipeline_model_parallel",
    "ep": "expert_model_parallel",
    "etp": "expert_tensor_parallel",
    "dp": "data_parallel",
}


def read(model: Any, decoder: DecoderLayers | None = None) -> ParallelLayout:
    """Return this rank's place in Megatron's parallel state, with the layers of a model or config.

    `decoder` holds the decoder layers of the whole model, if the caller knows them. Else they are looked for,
    which is slow for a config alone.
    """
    state: Any = sys.modules.get(_STATE)
    if state is None:
        raise ReplayError(
            "Megatron-core isn't running in this process",
            expected="from_megatron() after megatron.core.parallel_state.initialize_model_parallel()",
            got=f"{_STATE} was never imported",
            cause="called on the driver; give the numbers by hand there: ParallelLayout(tp=..., tp_rank=...)",
        )
    if not state.model_parallel_is_initialized():
        raise ReplayError(
            "Megatron-core's parallel state isn't initialised",
            expected="from_megatron() after initialize_model_parallel()",
            got="no model parallel groups",
        )
    config = config_of(model)
    if decoder is None:
        trees = [] if config is model else [ModuleTree.of(chunk) for chunk in chunks_of(model)]
        pattern = hybrid.pattern_in(trees) if trees else hybrid.pattern_of(config)
        decoder = decoder_layers(config, pattern)
    layout = ParallelLayout(
        **{axis: _of_axis(state, axis, "world_size") for axis in _AXES},
        **{f"{axis}_rank": _of_axis(state, axis, "rank") for axis in _AXES},
        vp=_virtual_stages(state, config),
        sequence_parallel=bool(config.sequence_parallel),
        gathers_rows=config.moe_token_dispatcher_type == "alltoall_seq",
        decoder=decoder,
        groups=(  # those that share a pipeline stage, then the stages
            state.get_tensor_and_context_parallel_group(),
            state.get_pipeline_model_parallel_group(),
        ),
    )
    if config is not model:
        layout.check(model)
    return layout


def config_of(model: Any) -> Any:
    """Return the TransformerConfig of a model, its chunks or a wrapper around one."""
    if hasattr(model, "pipeline_model_parallel_size"):
        return model
    config = _config_in(chunks_of(model))
    if config is None:
        raise ReplayError(
            "this model has no Megatron config",
            expected="a Megatron module, the list of its chunks, or its TransformerConfig",
            got=type(model).__name__,
            cause="a model of transformers, which has no parallel layout to read",
        )
    return config


def decoder_layers(config: Any, pattern: str | None = None) -> DecoderLayers:
    """Return the decoder layers of a config; a HybridModel's may lack its `pattern`, which is given then."""
    if (pattern := pattern or hybrid.pattern_on(config)) is not None:
        return DecoderLayers.of_pattern(
            pattern,
            first_stage=config.num_layers_in_first_pipeline_stage,
            last_stage=config.num_layers_in_last_pipeline_stage,
        )
    table = getattr(config, "pipeline_model_parallel_layout", None)
    count = int(config.num_layers)
    if table is None:
        stages = llm.pipeline_table(config)
    else:  # a PipelineParallelLayerLayout
        stages = [[sum(kind.name == "decoder" for kind in stage) for stage in rank] for rank in table.layout]
    return DecoderLayers(
        count,
        moe_layer_freq=llm.layer_kinds(config) if _has_experts(config) else [0] * count,
        first_stage=config.num_layers_in_first_pipeline_stage,
        last_stage=config.num_layers_in_last_pipeline_stage,
        embedding_counts=bool(config.account_for_embedding_in_pipeline_split),
        loss_counts=bool(config.account_for_loss_in_pipeline_split),
        table=stages,
    )


def is_dense_stage(chunks: Sequence[ModuleTree]) -> bool:
    """Return whether these chunks are a whole pipeline stage of an MoE model, with dense layers only."""
    stage = _stage(chunks)
    if stage is None or stage.pp == 1:
        return False
    return tuple(sorted(_decoder_layers_in(chunks))) == stage.layers and not stage.moe_layers


def check_chunks(chunks: Sequence[ModuleTree]) -> None:
    """Refuse a part of a rank's virtual stages: the others would run without a replay, unnoticed."""
    stage = _stage(chunks)
    if stage is None or stage.vp == 1:
        return
    here = _decoder_layers_in(chunks)
    if len(here) < len(stage.layers):
        raise RouterError(
            "this isn't all that this rank has of the model",
            where=f"pipeline rank {stage.pp_rank} of {stage.pp}, {stage.vp} virtual stages",
            expected=f"the list of all chunks, decoder layers {list(stage.layers)}",
            got=f"{len(chunks)} with decoder layers {sorted(here)}",
            cause="model[0] in the place of model",
        )


def _stage(chunks: Sequence[ModuleTree]) -> ParallelLayout | None:
    """Return this rank's place in the pipeline; None unless these are chunks of a running MoE model."""
    state = sys.modules.get(_STATE)
    if state is None or not state.model_parallel_is_initialized():
        return None
    config = _config_in([chunk.model for chunk in chunks])
    if config is None or not _has_experts(config):
        return None
    return ParallelLayout(
        pp=_of_axis(state, "pp", "world_size"),
        pp_rank=_of_axis(state, "pp", "rank"),
        vp=_virtual_stages(state, config),
        decoder=decoder_layers(config, hybrid.pattern_in(chunks)),
    )


def _decoder_layers_in(chunks: Sequence[ModuleTree]) -> set[int]:
    if (hybrid_layers := hybrid.layers_in(chunks)) is not None:
        return hybrid_layers
    product: Any = sys.modules.get("megatron.core.transformer.transformer_layer")
    return {
        int(module.layer_number) - 1
        for chunk in chunks
        for _, path, module in chunk.where(_has_number)
        if product is not None
        and (isinstance(module, product.TransformerLayer) or llm.is_noop(module))
        and not is_in_mtp(path)
        # A vision tower numbers its layers from 1, too; its config is dense.
        and ((config := getattr(module, "config", None)) is None or _has_experts(config))
    }


def _has_number(module: nn.Module, path: str) -> bool:
    return hasattr(module, "layer_number")


def is_in_mtp(path: str) -> bool:
    """Return whether a path is in multi-token prediction, whose layer numbers mean no decoder layer.

    >>> from npu_replay.compat.megatron import parallel_state
    >>> parallel_state.is_in_mtp("module.mtp.layers.0.mlp"), parallel_state.is_in_mtp("decoder.layers.0.mlp")
    (True, False)
    """
    return "mtp" in path.split(".")


def _has_experts(config: Any) -> bool:
    return getattr(config, "num_moe_experts", None) is not None


def _config_in(chunks: Sequence[nn.Module]) -> Any:
    """Return the first Megatron config of the chunks or of what they wrap; None without one."""
    configs = (getattr(module, "config", None) for chunk in chunks for module in unwrapped(chunk))
    return next((config for config in configs if hasattr(config, "pipeline_model_parallel_size")), None)


def unwrapped(module: Any) -> Iterator[Any]:
    """Yield a module and what it wraps (DDP, Float16Module), outermost first."""
    while isinstance(module, nn.Module):
        yield module
        module = getattr(module, "module", None)


def _of_axis(state: Any, axis: str, what: str) -> int:
    return int(getattr(state, f"get_{_AXES[axis]}_{what}")())


def _virtual_stages(state: Any, config: Any) -> int:
    """Return the number of virtual stages; the parallel state knows it only if it was initialised with it."""
    stages = getattr(config, "virtual_pipeline_model_parallel_size", None)
    if stages is None:
        stages = state.get_virtual_pipeline_model_parallel_world_size()
    return int(stages or 1)
