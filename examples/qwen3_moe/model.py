"""The model in transformers."""

from __future__ import annotations

from typing import Any

import torch


def qwen3_moe(seed: int, device: torch.device, **changes: Any) -> Any:
    """Build a Qwen3MoeForCausalLM in bfloat16: six layers, 32 experts, top-4.

    Its weights are random and wide enough that the routers tell tokens apart.

    Args:
        changes: of its config.
    """
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    values: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "max_position_embeddings": 64,
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(values | changes))).to(device, torch.bfloat16).eval()
