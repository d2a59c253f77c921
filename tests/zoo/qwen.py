"""A small Qwen3-MoE of random weights for tests inside frameworks, and a tokenizer whose tokens are words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

EXPERTS = 8
TOPK = 2


def make(vocabulary: int, layers: int, seed: int = 0, **changes: Any) -> Any:
    """In float32, with weights so wide that each choice of an expert counts."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    values: dict[str, Any] = {
        "vocab_size": vocabulary,
        "num_hidden_layers": layers,
        "hidden_size": 32,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts": EXPERTS,
        "num_experts_per_tok": TOPK,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,
    }
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(values | changes)))


def tokenizer(words: Iterable[str], **special: Any) -> Any:
    """One token a word between blanks, in this order; `special` as PreTrainedTokenizerFast has it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    numbers = {word: number for number, word in enumerate(words)}
    made = Tokenizer(WordLevel(numbers, unk_token=special.get("unk_token", next(iter(numbers)))))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)
