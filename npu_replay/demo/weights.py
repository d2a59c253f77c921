"""The weights of a Qwen3-MoE of transformers, put into a GPTModel of Megatron-core."""

from __future__ import annotations

from typing import Any

import torch

from npu_replay.demo import megatron_model


def trainer_like(rollout: Any, device: torch.device, **changes: Any) -> Any:
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
        **changes,
    )
    model = megatron_model.model(
        config,
        vocab=about.vocab_size,
        length=about.max_position_embeddings,
        rotary_base=int(about.rope_parameters["rope_theta"]),
    )
    model.load_state_dict(_state(rollout, model), strict=True)
    return model.to(device)


def _state(rollout: Any, model: Any) -> dict[str, Any]:
    """Every weight by Megatron's name; what Megatron keeps beside them stays as it is."""
    state: dict[str, Any] = {
        name: value for name, value in model.state_dict().items() if name.endswith("_extra_state")
    }
    inner = rollout.model
    state["embedding.word_embeddings.weight"] = inner.embed_tokens.weight
    state["decoder.final_layernorm.weight"] = inner.norm.weight
    state["output_layer.weight"] = rollout.lm_head.weight
    for number, layer in enumerate(inner.layers):
        attention, experts = layer.self_attn, layer.mlp.experts
        ours = {
            "input_layernorm.weight": layer.input_layernorm.weight,
            "pre_mlp_layernorm.weight": layer.post_attention_layernorm.weight,
            "self_attention.linear_qkv.weight": _interleaved_qkv(attention, rollout.config),
            "self_attention.linear_proj.weight": attention.o_proj.weight,
            "self_attention.q_layernorm.weight": attention.q_norm.weight,
            "self_attention.k_layernorm.weight": attention.k_norm.weight,
            "mlp.router.weight": layer.mlp.gate.weight,
        }
        for expert in range(rollout.config.num_experts):
            prefix = f"mlp.experts.local_experts.{expert}"
            ours[f"{prefix}.linear_fc1.weight"] = experts.gate_up_proj[expert]
            ours[f"{prefix}.linear_fc2.weight"] = experts.down_proj[expert]
        state |= {f"decoder.layers.{number}.{name}": weight for name, weight in ours.items()}
    return {k: v.detach().float().cpu() if isinstance(v, torch.Tensor) else v for k, v in state.items()}


def _interleaved_qkv(attention: Any, about: Any) -> torch.Tensor:
    """Megatron's linear_qkv: for each query group its queries, its key and its value."""
    groups, hidden = about.num_key_value_heads, about.hidden_size
    parts = [
        projection.weight.view(groups, -1, hidden)
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    ]
    return torch.cat(parts, dim=1).reshape(-1, hidden)
