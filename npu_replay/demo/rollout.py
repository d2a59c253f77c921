"""The rollout: a small Qwen3-MoE of transformers samples sequences and hands over the experts it used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import npu_replay
from npu_replay import RoutedExperts

PROMPT, RESPONSE, SEQUENCES = 8, 56, 8
SHORTEST = 40
"""Sequences end at different lengths, from here to PROMPT + RESPONSE, so that the trainer has to pad."""


@dataclass(frozen=True)
class Sample:
    """One sequence of the rollout.

    Attributes:
        tokens: int64 [length], prompt and response.
        prompt: how many of them are the prompt.
        log_probs: float32 [length - prompt], of the sampled tokens, in nats.
        routes: of all tokens, or all but the last, which was never fed to the model.
    """

    tokens: torch.Tensor
    prompt: int
    log_probs: torch.Tensor
    routes: RoutedExperts


def qwen3_moe(seed: int, device: torch.device, **changes: Any) -> Any:
    """Six layers, 32 experts, top-4, random weights wide enough to route by, in bfloat16."""
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
        "max_position_embeddings": PROMPT + RESPONSE,
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**(values | changes))).to(device, torch.bfloat16).eval()


def roll_out(model: Any, seed: int, device: torch.device) -> list[Sample]:
    """Sample with a KV cache: one forward over the prompts, then one a token."""
    torch.manual_seed(seed)
    prompts = random_prompts(model.config.vocab_size).to(device)
    with torch.inference_mode(), npu_replay.record(model) as recording:
        result = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=RESPONSE,
            do_sample=True,
            top_k=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
    tokens = result.sequences.cpu()
    logits = torch.stack(result.logits, dim=1).float().cpu()
    log_probs = logits.log_softmax(dim=-1).gather(2, tokens[:, PROMPT:, None])[..., 0]
    return [
        _sample(tokens[row, :length], log_probs[row, : length - PROMPT], recording.routes, row)
        for row, length in enumerate(lengths())
    ]


def random_prompts(vocabulary: int) -> torch.Tensor:
    """int64 [SEQUENCES, PROMPT]."""
    return torch.randint(0, vocabulary, (SEQUENCES, PROMPT))


def lengths() -> list[int]:
    """How long each sequence gets."""
    found: list[int] = torch.linspace(SHORTEST, PROMPT + RESPONSE, SEQUENCES).int().tolist()
    return found


def _sample(tokens: torch.Tensor, log_probs: torch.Tensor, forwards: list[RoutedExperts], row: int) -> Sample:
    """Put one sequence's rows together: batch-major in the prompts' forward, one in each that follows."""
    prompt = forwards[0].take(torch.arange(row * PROMPT, (row + 1) * PROMPT))
    steps = [forward.take([row]) for forward in forwards[1 : len(tokens) - PROMPT]]
    routes = RoutedExperts.concat([prompt, *steps])
    return Sample(
        tokens=tokens,
        prompt=PROMPT,
        log_probs=log_probs,
        routes=routes.sequence(0, len(routes), npu_replay.fingerprint(tokens)),
    )
