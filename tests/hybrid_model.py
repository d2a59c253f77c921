"""A small HybridModel (MambaModel up to 0.17) of real Megatron-core, where its patterns have E.

Its layers are local ones, so that no Transformer Engine and no accelerator is needed. The state space of an
`M` layer is a plain linear map: its kernels run on a GPU only.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any
from unittest import mock

import torch
from torch import nn

from npu_replay.demo import megatron_model
from npu_replay.smoke.model import Norm

_NEW = "megatron.core.models.hybrid"
_OLD = "megatron.core.ssm.mamba_hybrid_layer_allocation"


def missing(pattern: str = "E") -> str:
    """Why this release of Megatron can't build such a model; empty if it can."""
    if importlib.util.find_spec("megatron") is None:
        return "there is no Megatron-core"
    new = importlib.util.find_spec(_NEW) is not None
    symbols = importlib.import_module(f"{_NEW}.hybrid_layer_allocation" if new else _OLD).Symbols
    if not hasattr(symbols, "MOE"):
        return "the hybrid patterns of this release have no E"
    if not {*pattern} & {*"|/"} or hasattr(symbols, "PIPE"):
        return ""
    return "the hybrid patterns of this release have no | and no /"


def symbols(pattern: str) -> str:
    """One a layer of the main pattern."""
    return pattern.split("/")[0].replace("|", "")


def labels(pattern: str, moe: list[int] | tuple[int, ...]) -> dict[int, int]:
    """By the place of each E in the main pattern, the MoE layer of a Hugging Face config that it is."""
    places = [place for place, symbol in enumerate(symbols(pattern)) if symbol == "E"]
    return dict(zip(places, moe, strict=True))


class StateSpace(nn.Module):
    """In the place of an M layer's mixer."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.map = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return self.map(hidden), None


def config(pattern: str, **changes: Any) -> Any:
    """The config of megatron_model for this pattern."""
    return megatron_model.config(**{"num_layers": len(symbols(pattern))} | changes)


def model(
    cfg: Any,
    pattern: str,
    *,
    norm: type = Norm,
    attention: type | None = None,
    vp_stage: int | None = None,
    **ends: Any,
) -> Any:
    """Build a HybridModel, or a chunk of one.

    Args:
        cfg: its config.
        pattern: of the whole model.
        norm: of all norms.
        attention: in the place of Megatron's own attention core.
        vp_stage: which virtual stage of this pipeline rank; none where there is one.
        ends: pre_process, post_process and other arguments of the class.
    """
    product, block = _classes()
    parts = {name: spec for name, spec in _layers(cfg, norm, attention).items() if _takes(block[1], name)}
    if "/" in pattern:
        parts["mtp_block_spec"] = _mtp(norm)
    from megatron.core.transformer.spec_utils import ModuleSpec

    stack = ModuleSpec(module=block[0], submodules=block[1](**parts))
    names = inspect.signature(product).parameters
    spec = next(name for name in names if name.endswith("stack_spec"))
    where = "hybrid_layer_pattern" if "hybrid_layer_pattern" in names else "hybrid_override_pattern"
    stage = {} if vp_stage is None else {"vp_stage": vp_stage}
    # The norm behind the last layer is no part of the spec.
    with mock.patch.object(importlib.import_module(block[0].__module__), "TENorm", norm):
        return product(
            cfg,
            **{spec: stack, where: pattern},
            vocab_size=64,
            max_sequence_length=64,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            **ends,
            **stage,
        )


def chunks(cfg: Any, pattern: str, **about: Any) -> list[Any]:
    """This pipeline rank's chunks, one for each virtual stage; about: arguments of `model`."""
    from megatron.core import parallel_state

    place, last = parallel_state.get_pipeline_model_parallel_rank(), cfg.pipeline_model_parallel_size - 1
    count = cfg.virtual_pipeline_model_parallel_size or 1
    return [
        model(
            cfg,
            pattern,
            vp_stage=stage if count > 1 else None,
            pre_process=place == stage == 0,
            post_process=(place, stage) == (last, count - 1),
            **about,
        )
        for stage in range(count)
    ]


def _classes() -> tuple[Any, tuple[Any, Any]]:
    if importlib.util.find_spec(_NEW) is not None:
        block = importlib.import_module(f"{_NEW}.hybrid_block")
        model = importlib.import_module(f"{_NEW}.hybrid_model").HybridModel
        return model, (block.HybridStack, block.HybridStackSubmodules)
    block = importlib.import_module("megatron.core.ssm.mamba_block")
    model = importlib.import_module("megatron.core.models.mamba").MambaModel
    return model, (block.MambaStack, block.MambaStackSubmodules)


def _takes(kind: Any, name: str) -> bool:
    return name in inspect.signature(kind).parameters


def _layers(cfg: Any, norm: type, attention: type | None) -> dict[str, Any]:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        MoETransformerLayer,
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    linear = {"linear_fc1": ColumnParallelLinear, "linear_fc2": RowParallelLinear}
    mixer = SelfAttentionSubmodules(
        linear_qkv=ColumnParallelLinear,
        core_attention=attention or DotProductAttention,
        linear_proj=RowParallelLinear,
        **({"q_layernorm": norm, "k_layernorm": norm} if cfg.qk_layernorm else {}),
    )

    def feeds(kind: type, mlp: Any) -> Any:
        parts = TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=get_bias_dropout_add)
        return ModuleSpec(module=kind, submodules=parts)

    return {
        "mamba_layer": ModuleSpec(
            module=MambaLayer,
            submodules=MambaLayerSubmodules(
                norm=norm, mixer=ModuleSpec(module=StateSpace), mamba_bda=get_bias_dropout_add
            ),
        ),
        "attention_layer": ModuleSpec(
            module=TransformerLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=norm,
                self_attention=ModuleSpec(
                    module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=mixer
                ),
                self_attn_bda=get_bias_dropout_add,
            ),
        ),
        "mlp_layer": feeds(MLPLayer, ModuleSpec(module=MLP, submodules=MLPSubmodules(**linear))),
        "moe_layer": feeds(
            MoETransformerLayer,
            get_moe_module_spec(use_te=False, num_experts=cfg.num_moe_experts, moe_grouped_gemm=False),
        ),
    }


def _mtp(norm: type) -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.spec_utils import ModuleSpec

    parts = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None, layer_norm=norm
    )
    layer = ModuleSpec(module=mtp.MultiTokenPredictionLayer, submodules=parts)
    return ModuleSpec(
        module=mtp.MultiTokenPredictionBlock,
        submodules=mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
    )
