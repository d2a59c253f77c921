"""Real transformers models on an accelerator: what their routers do there is the CPU's, and is replayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import npu_replay
from npu_replay import RoutedExperts, routers

pytestmark = [pytest.mark.accelerator, pytest.mark.slow]

transformers.logging.set_verbosity_error()

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8},
    "deepseek_v3": LATENT
    | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
}
EXPERTS, TOPK = 8, 2
CPU = torch.device("cpu")


def build(family: str, recompute: str | None = None) -> nn.Module:
    config = AutoConfig.for_model(family, **(SIZES | FAMILIES[family]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").train()
    with torch.no_grad():
        for router in routers.find([model])[0]:
            for weight in router.module.parameters():  # some start as zeros: every token would choose alike
                weight.normal_()
    if recompute is not None:
        kwargs = {"use_reentrant": recompute == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    return model


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 60, (2, 5 + number), generator=generator) for number in range(2)]


def train(model: nn.Module, device: torch.device) -> list[torch.Tensor]:
    """Losses of two micro-batches and every gradient of one backward over both, on the CPU."""
    model.zero_grad()
    inputs = [batch.to(device) for batch in batches()]
    losses = [model(input_ids=batch, labels=batch, use_cache=False).loss for batch in inputs]
    sum(losses).backward()
    grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
    assert all(grad.device.type == device.type for grad in grads)
    return [x.detach().cpu() for x in (*losses, *grads)]


def foreign(model: nn.Module) -> list[RoutedExperts]:
    generator = torch.Generator().manual_seed(3)
    layers = [router.label for router in routers.find([model])[0]]
    return [
        RoutedExperts(
            ids=torch.rand(batch.numel(), len(layers), EXPERTS, generator=generator).topk(TOPK).indices,
            layers=layers,
            num_experts=EXPERTS,
        )
        for batch in batches()
    ]


@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_record_and_replay_repeat_the_run_and_the_cpus(
    family: str, recompute: str | None, device: torch.device
) -> None:
    model = build(family, recompute)
    routes = foreign(model)
    with npu_replay.replay(model, routes):
        expected = train(model, CPU)
    model.to(device)
    untouched = train(model, device)
    with npu_replay.record(model) as recording:
        recorded = train(model, device)
    with npu_replay.replay(model, recording.routes):
        replayed = train(model, device)
    with npu_replay.observe(model) as seen, npu_replay.replay(model, routes):
        found = train(model, device)
    for result in (recorded, replayed):
        assert all(map(torch.equal, result, untouched))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert npu_replay.compare(seen.shown, routes).differing == 0
