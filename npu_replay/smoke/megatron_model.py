"""Build a small model of real Megatron-core, from 0.12 on, for smoke, the tests, benchmarks and examples.

A GPTModel of local layers: no Transformer Engine, CUDA or launcher is needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from npu_replay.devices import backend, pick

FULL_RECOMPUTE: dict[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
"""The flags that repeat every layer's forward inside backward."""


def start(device: torch.device | None = None) -> None:
    """Initialise torch.distributed and Megatron's parallel state for this process alone, once.

    The model will be on `device`; None takes the accelerator, where there is one.
    """
    from megatron.core import parallel_state, tensor_parallel

    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend(device or pick("auto")), store=store, rank=0, world_size=1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)


def config(**changes: Any) -> Any:
    """Return a TransformerConfig of a Qwen3-MoE-like model of four layers, with `changes`."""
    from megatron.core.transformer import TransformerConfig

    values: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": 8,
        "ffn_hidden_size": 48,
        "moe_ffn_hidden_size": 32,
        "num_moe_experts": 8,
        "moe_router_topk": 2,
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_token_dispatcher_type": "alltoall",
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "layernorm_epsilon": 1e-6,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
    }
    return TransformerConfig(**(values | changes))


def model(
    cfg: Any,
    *,
    vocab: int = 64,
    length: int = 64,
    rotary_base: int = 10_000,
    norm: type | None = None,
    attention: type | None = None,
    vp_stage: int | None = None,
    **ends: bool,
) -> Any:
    """Build a GPTModel from `cfg`; dense and MoE layers follow its moe_layer_freq.

    Args:
        norm, attention: replace Megatron's own norms and attention core.
        vp_stage: the virtual stage of this pipeline rank; None where there is one.
        ends: pre_process and post_process, for a chunk of a pipeline.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    stage = {}
    if vp_stage is not None:
        parallel_state.set_virtual_pipeline_model_parallel_rank(vp_stage)  # older releases read it
        stage = {"vp_stage": vp_stage} if "vp_stage" in inspect.signature(GPTModel).parameters else {}
    spec = get_gpt_decoder_block_spec(cfg, use_transformer_engine=False, **stage)
    inner = [layer.submodules for layer in spec.layer_specs]
    if norm is not None:
        spec.layer_norm = norm
        for layer in inner:
            layer.input_layernorm = layer.pre_mlp_layernorm = norm
            layer.self_attention.submodules.q_layernorm = layer.self_attention.submodules.k_layernorm = norm
    if attention is not None:
        for layer in inner:
            layer.self_attention.submodules.core_attention = attention
    return GPTModel(
        config=cfg,
        transformer_layer_spec=spec,
        vocab_size=vocab,
        max_sequence_length=length,
        position_embedding_type="rope",
        rotary_base=rotary_base,
        share_embeddings_and_output_weights=False,
        **ends,
        **stage,
    )


def chunks(cfg: Any, *, build: Callable[..., Any] = model, **about: Any) -> list[Any]:
    """Build this pipeline rank's chunks of the model, one for each virtual stage.

    Args:
        build: builds a chunk.
        about: arguments of `build`.
    """
    from megatron.core import parallel_state

    place = parallel_state.get_pipeline_model_parallel_rank()
    last = cfg.pipeline_model_parallel_size - 1
    count = cfg.virtual_pipeline_model_parallel_size or 1
    return [
        build(
            cfg,
            vp_stage=stage if count > 1 else None,
            pre_process=place == stage == 0,
            post_process=(place, stage) == (last, count - 1),
            **about,
        )
        for stage in range(count)
    ]


def causal(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return position_ids and attention_mask of int64 [batch, length]; True in the mask hides a position.

    Padding on the right needs no mask: nothing before it can see it.

    >>> causal(torch.zeros(1, 2))["attention_mask"].tolist()
    [[[[False, True], [False, False]]]]
    """
    (batch, length) = tokens.shape
    device = tokens.device
    hidden = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    return {
        "position_ids": torch.arange(length, device=device).expand(batch, length),
        "attention_mask": hidden[None, None],
    }
