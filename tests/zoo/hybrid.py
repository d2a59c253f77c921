"""A small HybridModel (MambaModel up to 0.17) of real Megatron-core, where its patterns have E.

Its layers need no accelerator: others are in the place of `M` layers (the kernels of a state space run on a
GPU only), and it has multi-token prediction.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any
from unittest import mock

import torch
from torch import nn

from npu_replay.smoke import megatron_model
from npu_replay.smoke.model import Norm

_NEW = "megatron.core.models.hybrid"
_OLD = "megatron.core.ssm"
"""Where Megatron has its HybridModel, or what this was up to 0.17."""


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


def model(cfg: Any, pattern: str, *, norm: type = Norm, **about: Any) -> Any:
    """Build a HybridModel, or a chunk of one; about: arguments of `_build`."""
    parts = {"mamba_layer": _state_space(norm)} | ({"mtp_block_spec": _mtp(norm)} if "/" in pattern else {})
    return _build(cfg, pattern, norm=norm, parts=parts, **about)


def chunks(cfg: Any, pattern: str, **about: Any) -> list[Any]:
    """This pipeline rank's chunks, one for each virtual stage; about: arguments of `model`."""
    return megatron_model.chunks(cfg, build=model, pattern=pattern, **about)


def _state_space(norm: type) -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    mixer = ModuleSpec(module=StateSpace)
    parts = MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    return ModuleSpec(module=MambaLayer, submodules=parts)


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


def _build(
    cfg: Any,
    pattern: str,
    *,
    norm: type,
    attention: type | None = None,
    vocab: int = 64,
    length: int = 64,
    vp_stage: int | None = None,
    parts: dict[str, Any] | None = None,
    **ends: Any,
) -> Any:
    """Build a HybridModel, or a chunk of one, of this pattern; the rest as in `model`.

    `parts` are specs of other kinds of layers, by their names in Megatron's spec of the decoder.
    """
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer import spec_utils, transformer_layer

    def half(kind: type, layer: Any, *names: str) -> Any:
        taken = {name: norm if name.endswith("layernorm") else getattr(layer, name) for name in names}
        submodules = transformer_layer.TransformerLayerSubmodules(**taken)
        return spec_utils.ModuleSpec(module=kind, submodules=submodules)

    # `*`, `-` and `E` are the halves of a GPTModel's local layers.
    dense, moe = (
        get_gpt_layer_local_spec(count, qk_layernorm=cfg.qk_layernorm, normalization="RMSNorm").submodules
        for count in (None, cfg.num_moe_experts)
    )
    mixer = dense.self_attention.submodules
    if cfg.qk_layernorm:
        mixer.q_layernorm = mixer.k_layernorm = norm
    mixer.core_attention = attention or mixer.core_attention
    mlp = ("pre_mlp_layernorm", "mlp", "mlp_bda")
    plain = transformer_layer.TransformerLayer
    name, block = _block()
    layers = getattr(block, f"{name}StackSubmodules")(
        attention_layer=half(plain, dense, "input_layernorm", "self_attention", "self_attn_bda"),
        mlp_layer=half(MLPLayer, dense, *mlp),
        moe_layer=half(getattr(transformer_layer, "MoETransformerLayer", plain), moe, *mlp),
        **(parts or {}),
    )
    spec = spec_utils.ModuleSpec(module=getattr(block, f"{name}Stack"), submodules=layers)
    models = importlib.import_module(f"megatron.core.models.{name.lower()}.{name.lower()}_model")
    product = getattr(models, f"{name}Model")
    names = inspect.signature(product).parameters
    with mock.patch.object(block, "TENorm", norm):  # the final norm isn't in the spec
        return product(
            cfg,
            vocab_size=vocab,
            max_sequence_length=length,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            **{next(argument for argument in names if argument.endswith("_pattern")): pattern},
            **{f"{name.lower()}_stack_spec": spec},
            **({} if vp_stage is None else {"vp_stage": vp_stage}),
            **ends,
        )


def missing(pattern: str = "E") -> str:
    """Return why the installed Megatron can't build a HybridModel of this pattern; empty if it can."""
    if importlib.util.find_spec("megatron") is None:
        return "there is no Megatron-core"
    where = f"{_NEW}.hybrid" if importlib.util.find_spec(_NEW) else f"{_OLD}.mamba_hybrid"
    symbols = importlib.import_module(f"{where}_layer_allocation").Symbols
    if not hasattr(symbols, "MOE"):
        return "a HybridModel with experts needs Megatron-core 0.16 or newer: this one's patterns have no E"
    if not {*pattern} & {*"|/"} or hasattr(symbols, "PIPE"):
        return ""
    return "a HybridModel with | or / needs Megatron-core 0.17 or newer: this one's patterns have neither"


def recompute() -> dict[str, Any]:
    """Return the flags that repeat every router inside backward; MambaModel has no full recompute."""
    if hasattr(_block()[1], "checkpointed_forward"):
        return megatron_model.FULL_RECOMPUTE
    return {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def _block() -> tuple[str, Any]:
    """Return the prefix of Megatron's class names, and the module of the decoder."""
    name, where = ("Hybrid", _NEW) if importlib.util.find_spec(_NEW) else ("Mamba", _OLD)
    return name, importlib.import_module(f"{where}.{name.lower()}_block")
