"""Real transformers models, small and random, and how the tests run them: on the CPU or a device."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from npu_replay import RoutedExperts, routers
from zoo.outcome import backward, gradients, random_routes
from zoo.outcome import same as same

transformers.logging.set_verbosity_error()

# fmt: off
SIZES = {
    "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "vocab_size": 64,
    "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
# fmt: on
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
ONE_GROUP = {"n_routed_experts": 8, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
FOUR_GROUPS = ONE_GROUP | {"n_group": 4, "topk_group": 2}

# family, what its config needs beside SIZES, and its decoder layers with experts
FAMILIES: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "qwen3_moe": ("qwen3_moe", {"num_experts": 8}, (0, 1, 2)),
    "qwen2_moe": ("qwen2_moe", {"num_experts": 8, "shared_expert_intermediate_size": 16}, (0, 1, 2)),
    "mixtral": ("mixtral", {"num_local_experts": 8}, (0, 1, 2)),
    "olmoe": ("olmoe", {"num_experts": 8}, (0, 1, 2)),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 8}, (0, 1, 2)),
    "glm4_moe": ("glm4_moe", ONE_GROUP, (1, 2)),
    "deepseek_v3-1-group": ("deepseek_v3", LATENT | ONE_GROUP, (1, 2)),
    "deepseek_v3-4-groups": ("deepseek_v3", LATENT | FOUR_GROUPS, (1, 2)),
    "deepseek_v2-groups": (
        "deepseek_v2",
        LATENT | FOUR_GROUPS | {"topk_method": "group_limited_greedy", "n_shared_experts": 1},
        (1, 2),
    ),
}
RECOMPUTE = (None, "non-reentrant", "reentrant")
EXPERTS = 8
TOPK = 2


def build(
    family: str, recompute: str | None = None, experts: str | None = None, **changes: Any
) -> PreTrainedModel:
    """The same weights at each call; `experts` is an implementation of them, which releases before 5 lack."""
    model_type, special, _ = FAMILIES[family]
    config = AutoConfig.for_model(model_type, **(SIZES | special | changes))
    torch.manual_seed(0)
    how = {} if experts is None else {"experts_implementation": experts}
    model = AutoModelForCausalLM.from_config(config, **how).train()
    with torch.no_grad():
        for router in routers.find([model])[0]:
            for weight in router.module.parameters():  # some start as zeros: all would choose alike
                if weight.dim() < 3 and len(weight) == EXPERTS:  # in 4 it is a block with its experts
                    weight.normal_()
    if recompute is not None:
        reentrant = recompute == "reentrant"
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def batches(count: int = 5) -> list[torch.Tensor]:
    """Micro-batches; of five, number 3 is neither checked nor the last, as most of a job's."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 60, (2, 5 + number), generator=generator) for number in range(count)]


def train(model: nn.Module, order: str = "sum", count: int = 5, **inputs: Any) -> list[torch.Tensor | None]:
    """Losses of some micro-batches and every gradient. `order` is that of the backwards."""
    model.zero_grad()
    losses = []
    device = next(model.parameters()).device
    for batch in (ids.to(device) for ids in batches(count)):
        losses.append(model(input_ids=batch, labels=batch, use_cache=False, **inputs).loss)
        if order == "each":
            losses[-1].backward()
    if order != "each":
        backward(losses, order)
    return [*(loss.detach() for loss in losses), *gradients(model)]


def foreign(model: nn.Module, count: int = 5) -> list[RoutedExperts]:
    """Random routes that this model would hardly choose."""
    layers = [router.label for router in routers.find([model])[0]]
    return random_routes([batch.numel() for batch in batches(count)], layers, EXPERTS, TOPK, seed=3)
