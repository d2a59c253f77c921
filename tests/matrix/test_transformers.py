"""record and replay of small models of the transformers on the path."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import npu_replay
from megatron_cases import same
from npu_replay import RoutedExperts
from npu_replay.routers import find

transformers.logging.set_verbosity_error()

EXPERTS, TOPK, LAYERS = 8, 2, 3
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 64,
    "num_experts_per_tok": TOPK,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": EXPERTS},
    "mixtral": {"num_local_experts": EXPERTS},
    "deepseek_v3": {
        "n_routed_experts": EXPERTS,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
}
CHECKPOINTS: dict[str, dict[str, Any] | None] = {
    "no checkpoint": None,
    "reentrant": {"use_reentrant": True},
    "non-reentrant": {"use_reentrant": False},
}


def build(family: str, checkpoint: dict[str, Any] | None) -> Any:
    """A model of this family, the same weights for every way to checkpoint."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **(SIZES | FAMILIES[family])))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
    if checkpoint is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoint)
    return model.train()


def run(model: Any) -> tuple[list[float], list[torch.Tensor | None]]:
    """Losses of two micro-batches of two sequences, and the gradients of one backward over both."""
    model.zero_grad()
    generator = torch.Generator().manual_seed(2)
    batches = [torch.randint(1, 64, (2, length), generator=generator) for length in (6, 9)]
    losses = [model(input_ids=batch, labels=batch, use_cache=False).loss for batch in batches]
    sum(losses).backward()
    grads = [None if weight.grad is None else weight.grad.clone() for weight in model.parameters()]
    return [loss.item() for loss in losses], grads


def foreign(like: list[RoutedExperts]) -> list[RoutedExperts]:
    """Random routes that this model would hardly choose."""
    generator = torch.Generator().manual_seed(3)
    return [
        RoutedExperts(
            ids=torch.rand(*one.ids.shape[:2], EXPERTS, generator=generator).topk(TOPK).indices,
            layers=one.layers,
            num_experts=EXPERTS,
        )
        for one in like
    ]


def _case(family: str, checkpoint: str) -> Any:
    shows = [family, *(["checkpointing"] if CHECKPOINTS[checkpoint] else [])]
    return pytest.param(
        family,
        checkpoint,
        marks=[pytest.mark.capability(name) for name in shows],
        id=f"{family}-{checkpoint}",
    )


@pytest.mark.parametrize(
    ("family", "checkpoint"), [_case(family, checkpoint) for family in FAMILIES for checkpoint in CHECKPOINTS]
)
def test_a_record_changes_nothing_and_every_recompute_replays_its_own_forward(
    family: str, checkpoint: str
) -> None:
    model, plain = build(family, CHECKPOINTS[checkpoint]), build(family, None)
    untouched = run(model)
    with npu_replay.record(model) as recording:
        assert same(run(model), untouched)
    dense = 1 if family == "deepseek_v3" else 0
    assert [one.layers for one in recording.routes] == [tuple(range(dense, LAYERS))] * 2
    with npu_replay.replay(model, recording.routes):
        assert same(run(model), untouched)
    others = foreign(recording.routes)
    with npu_replay.observe(plain) as seen, npu_replay.replay(plain, others):
        expected = run(plain)
    assert npu_replay.compare(seen.shown, others).differing == 0
    assert not same(expected, untouched)
    with npu_replay.replay(model, others):
        assert same(run(model), expected)
    assert len(find([plain])[0]) == LAYERS - dense
