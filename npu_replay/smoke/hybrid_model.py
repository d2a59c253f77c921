"""Build a small HybridModel of real Megatron-core (MambaModel up to 0.17), for smoke and the tests.

It is built of local layers, as the GPTModel of `megatron_model` is.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any
from unittest import mock

from npu_replay.smoke import megatron_model

_NEW, _OLD = "megatron.core.models.hybrid", "megatron.core.ssm"


def missing(pattern: str = "E") -> str:
    """Return why the installed Megatron can't build a model of this pattern; empty if it can."""
    if importlib.util.find_spec("megatron") is None:
        return "there is no Megatron-core"
    where = f"{_NEW}.hybrid" if importlib.util.find_spec(_NEW) else f"{_OLD}.mamba_hybrid"
    symbols = importlib.import_module(f"{where}_layer_allocation").Symbols
    if not hasattr(symbols, "MOE"):
        return "a HybridModel with experts needs Megatron-core 0.16 or newer: this one's patterns have no E"
    if not {*pattern} & {*"|/"} or hasattr(symbols, "PIPE"):
        return ""
    return "a HybridModel with | or / needs Megatron-core 0.17 or newer: this one's patterns have neither"


def model(
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
    """Build a HybridModel, or a chunk of one, of this pattern; the rest as in `megatron_model`.

    `parts` are specs of other kinds of layers, by their names in Megatron's spec of the decoder.
    """
    from megatron.core.transformer.spec_utils import ModuleSpec

    name, block = _block()
    models = importlib.import_module(f"megatron.core.models.{name.lower()}.{name.lower()}_model")
    spec = getattr(block, f"{name}StackSubmodules")(**_layers(cfg, norm, attention), **(parts or {}))
    names = inspect.signature(product := getattr(models, f"{name}Model")).parameters
    given = {next(one for one in names if one.endswith("_pattern")): pattern}
    given[f"{name.lower()}_stack_spec"] = ModuleSpec(module=getattr(block, f"{name}Stack"), submodules=spec)
    with mock.patch.object(block, "TENorm", norm):  # the final norm isn't in the spec
        return product(
            cfg,
            vocab_size=vocab,
            max_sequence_length=length,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            **given,
            **ends,
            **({} if vp_stage is None else {"vp_stage": vp_stage}),
        )


def recompute() -> dict[str, Any]:
    """Return the flags that repeat every router inside backward; MambaModel has no full recompute."""
    if hasattr(_block()[1], "checkpointed_forward"):
        return megatron_model.FULL_RECOMPUTE
    return {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def _block() -> tuple[str, Any]:
    """Return the prefix of Megatron's class names, and the module of the decoder."""
    name, where = ("Hybrid", _NEW) if importlib.util.find_spec(_NEW) else ("Mamba", _OLD)
    return name, importlib.import_module(f"{where}.{name.lower()}_block")


def _layers(cfg: Any, norm: type, attention: type | None) -> dict[str, Any]:
    """Return the specs of `*`, `-` and `E`: the halves of a GPTModel's local layers."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer import spec_utils, transformer_layer

    def half(kind: type, layer: Any, *names: str) -> Any:
        taken = {name: norm if name.endswith("layernorm") else getattr(layer, name) for name in names}
        parts = transformer_layer.TransformerLayerSubmodules(**taken)
        return spec_utils.ModuleSpec(module=kind, submodules=parts)

    dense, moe = (
        get_gpt_layer_local_spec(count, qk_layernorm=cfg.qk_layernorm, normalization="RMSNorm").submodules
        for count in (None, cfg.num_moe_experts)
    )
    mixer = dense.self_attention.submodules
    if cfg.qk_layernorm:
        mixer.q_layernorm = mixer.k_layernorm = norm
    mixer.core_attention = attention or mixer.core_attention
    mlp = "pre_mlp_layernorm", "mlp", "mlp_bda"
    plain = transformer_layer.TransformerLayer
    return {
        "attention_layer": half(plain, dense, "input_layernorm", "self_attention", "self_attn_bda"),
        "mlp_layer": half(MLPLayer, dense, *mlp),
        "moe_layer": half(getattr(transformer_layer, "MoETransformerLayer", plain), moe, *mlp),
    }
