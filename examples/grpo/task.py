"""The task: sort some digits. A small Qwen3-MoE, taught until it solves a part of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

BEGIN, SORTED, END = 10, 11, 12
"""Tokens beside the ten digits: a prompt is BEGIN 3 1 2 SORTED, its answer 1 2 3 END."""
VOCABULARY = 64
LONGEST = 12
"""Tokens of an answer, at most."""


def prompts(count: int, seed: int, longest: int = 10) -> list[list[int]]:
    """Prompts of `longest` - 4 to `longest` digits; the same ones for the same seed."""
    dice = random.Random(seed)
    return [
        [BEGIN, *(dice.randrange(10) for _ in range(dice.randint(longest - 4, longest))), SORTED]
        for _ in range(count)
    ]


def answer(prompt: Sequence[int]) -> list[int]:
    """The only right one."""
    return [*sorted(prompt[1:-1]), END]


def reward(prompt: Sequence[int], sampled: Sequence[int]) -> float:
    """1 for the right answer, else 0."""
    return float(list(sampled) == answer(prompt))


def model(layers: int, experts: int) -> Any:
    """Qwen3-MoE in float32, random weights; 5 million of them with 6 layers and 32 experts."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        max_position_embeddings=64,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    return Qwen3MoeForCausalLM(config)


def save(pupil: Any, folder: Path) -> None:
    """In bfloat16, with a tokenizer: vLLM's server wants one, though all that it is sent are token ids."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {"begin": BEGIN, "sorted": SORTED, "end": END}
    names |= {str(number): number for number in range(VOCABULARY) if number not in names.values()}
    tokenizer = Tokenizer(models.WordLevel(names, unk_token="63"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="end").save_pretrained(folder)
    pupil.to(torch.bfloat16).save_pretrained(folder)


def teach(pupil: Any, steps: int, batch: int = 64) -> float:
    """Train on right answers; the last loss, in nats a token."""
    optimizer = torch.optim.AdamW(pupil.parameters(), lr=1e-3, weight_decay=0.0)
    loss = torch.zeros(())
    for step in range(steps):
        asked = prompts(batch, seed=1_000_000 + step)
        rows = [torch.tensor([*prompt, *answer(prompt)]) for prompt in asked]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        wanted = torch.full_like(tokens, -100)
        for row, (prompt, whole) in enumerate(zip(asked, rows, strict=True)):
            wanted[row, len(prompt) - 1 : len(whole) - 1] = whole[len(prompt) :]
        loss = cross_entropy(pupil(tokens).logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(pupil.parameters(), 1.0)
        optimizer.step()
    return loss.item()
