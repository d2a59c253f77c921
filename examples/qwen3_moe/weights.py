"""The same weights in transformers' Qwen3-MoE and in Megatron's GPTModel, both ways."""

from __future__ import annotations

from typing import Any

import torch

from npu_replay.smoke import megatron_model

_LAYER = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_ENDS = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_EXPERTS = {"linear_fc1": "gate_up_proj", "linear_fc2": "down_proj"}
_PROJECTIONS = ("q_proj", "k_proj", "v_proj")

State = dict[str, torch.Tensor]


def like(rollout: Any, device: torch.device) -> Any:
    """A GPTModel in float32 with the weights of `rollout`, a Qwen3MoeForCausalLM."""
    about = rollout.config
    config = megatron_model.config(
        num_layers=about.num_hidden_layers,
        hidden_size=about.hidden_size,
        num_attention_heads=about.num_attention_heads,
        num_query_groups=about.num_key_value_heads,
        kv_channels=about.head_dim,
        ffn_hidden_size=about.intermediate_size,
        moe_ffn_hidden_size=about.moe_intermediate_size,
        num_moe_experts=about.num_experts,
        moe_router_topk=about.num_experts_per_tok,
        layernorm_epsilon=about.rms_norm_eps,
        **megatron_model.FULL_RECOMPUTE,
    )
    model = megatron_model.model(
        config,
        vocab=about.vocab_size,
        length=about.max_position_embeddings,
        rotary_base=int(about.rope_parameters["rope_theta"]),
    )
    kept = {name: value for name, value in model.state_dict().items() if name.endswith("_extra_state")}
    model.load_state_dict(kept | to_megatron(rollout.state_dict(), about), strict=True)
    return model.to(device)


def to_megatron(theirs: State, about: Any) -> State:
    """Every weight of a Qwen3MoeForCausalLM by Megatron's name, in float32 on the CPU.

    Args:
        theirs: its state_dict.
        about: its config.
    """
    ours = {name: theirs[other] for name, other in _ENDS.items()}
    for layer in range(about.num_hidden_layers):
        here, there = f"decoder.layers.{layer}", f"model.layers.{layer}"
        ours |= {f"{here}.{name}": theirs[f"{there}.{other}"] for name, other in _LAYER.items()}
        # For each query group its queries, its key and its value.
        parts = [
            theirs[f"{there}.self_attn.{name}.weight"].view(about.num_key_value_heads, -1, about.hidden_size)
            for name in _PROJECTIONS
        ]
        ours[f"{here}.self_attention.linear_qkv.weight"] = torch.cat(parts, dim=1).flatten(0, 1)
        for name, other in _EXPERTS.items():
            for expert, weight in enumerate(theirs[f"{there}.mlp.experts.{other}"]):
                ours[f"{here}.mlp.experts.local_experts.{expert}.{name}.weight"] = weight
    return {name: weight.detach().float().cpu() for name, weight in ours.items()}


def to_transformers(ours: State, about: Any) -> State:
    """The way back: every weight of a GPTModel by transformers' name.

    Args:
        ours: its state_dict.
        about: the config of the Qwen3MoeForCausalLM.
    """
    theirs = {other: ours[name] for name, other in _ENDS.items()}
    queries = about.num_attention_heads // about.num_key_value_heads
    for layer in range(about.num_hidden_layers):
        here, there = f"decoder.layers.{layer}", f"model.layers.{layer}"
        theirs |= {f"{there}.{other}": ours[f"{here}.{name}"] for name, other in _LAYER.items()}
        joined = ours[f"{here}.self_attention.linear_qkv.weight"].view(
            about.num_key_value_heads, -1, about.head_dim, about.hidden_size
        )
        for name, part in zip(_PROJECTIONS, torch.split(joined, [queries, 1, 1], dim=1), strict=True):
            theirs[f"{there}.self_attn.{name}.weight"] = part.flatten(0, 2)
        for name, other in _EXPERTS.items():
            theirs[f"{there}.mlp.experts.{other}"] = torch.stack(
                [
                    ours[f"{here}.mlp.experts.local_experts.{expert}.{name}.weight"]
                    for expert in range(about.num_experts)
                ]
            )
    return {name: weight.detach().float().cpu() for name, weight in theirs.items()}
