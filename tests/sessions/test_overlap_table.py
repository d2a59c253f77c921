"""Which rows are taken and which refused, by router, by fault and by family; -s prints tables of it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import npu_replay
from judged_rows import check, of_engine, rounded
from npu_replay import RoutedExperts

pytest.importorskip("transformers")

from live.families import VOCABULARY, make

BATCH = 8
LENGTH = 80
QWEN = {"num_experts": 64, "num_experts_per_tok": 4, "num_hidden_layers": 5}

pytestmark = pytest.mark.slow


def texts(count: int, seed: int) -> list[torch.Tensor]:
    """Micro-batches of a language in which each token has four successors."""
    generator = torch.Generator().manual_seed(seed)
    after = torch.randint(3, VOCABULARY, (VOCABULARY, 4), generator=torch.Generator().manual_seed(9))
    batches = []
    for _ in range(count):
        rows = [torch.randint(3, VOCABULARY, (BATCH,), generator=generator)]
        for _ in range(LENGTH - 1):
            rows.append(after[rows[-1], torch.randint(4, (BATCH,), generator=generator)])
        batches.append(torch.stack(rows, dim=1))
    return batches


def update(model: Any, steps: int, rate: float) -> Any:
    """The model after so many steps of AdamW on texts of the language."""
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=rate
    )
    for batch in texts(steps, seed=3):
        optimizer.zero_grad()
        model(batch, labels=batch, use_cache=False).loss.backward()
        optimizer.step()
    return model


@functools.cache
def policy(kind: str) -> Any:
    if kind == "biased":
        return make("DeepseekV3", num_hidden_layers=5)
    model = make("Qwen3Moe", **QWEN)
    if kind == "near-uniform":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.gate.weight.mul_(1e-3)
    return update(model, 60, 3e-3) if kind == "trained" else model


def rows_of(model: Any, batch: torch.Tensor) -> RoutedExperts:
    with torch.no_grad(), npu_replay.record(model, inputs=False) as recording:
        model(batch, use_cache=False)
    routes = recording.routes[0]
    return of_engine(routes.ids, routes)


def with_adapters(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, lora_alpha=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    torch.manual_seed(0)  # how far the adapters move the choice depends on what they begin with
    return peft.get_peft_model(copy.deepcopy(model), config)


def noisy(model: Any) -> Any:
    model = copy.deepcopy(model)
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_pre_hook(
            lambda _, args: (args[0] * (1 + 0.01 * (2 * torch.rand_like(args[0]) - 1)), *args[1:])
        )
    return model


# The trainer's model and the engine's, of a policy.
ROUTERS: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "trained, bfloat16": ("trained", copy.deepcopy, lambda model: copy.deepcopy(model).bfloat16()),
    "trained, 8 bits": ("trained", copy.deepcopy, lambda model: rounded(copy.deepcopy(model), 8)),
    "trained, 4 bits": ("trained", copy.deepcopy, lambda model: rounded(copy.deepcopy(model), 4)),
    "trained, noise of 1 %": ("trained", noisy, copy.deepcopy),
    "untrained, bfloat16": ("untrained", copy.deepcopy, lambda model: copy.deepcopy(model).bfloat16()),
    "untrained, 4 bits": ("untrained", copy.deepcopy, lambda model: rounded(copy.deepcopy(model), 4)),
    "near-uniform, bfloat16": ("near-uniform", copy.deepcopy, lambda model: copy.deepcopy(model).bfloat16()),
    "biased, in groups, bfloat16": ("biased", copy.deepcopy, lambda model: copy.deepcopy(model).bfloat16()),
    "biased, in groups, 8 bits": ("biased", copy.deepcopy, lambda model: rounded(copy.deepcopy(model), 8)),
    "LoRA in the trainer alone": ("trained", with_adapters, lambda model: copy.deepcopy(model).bfloat16()),
}
"""By name, the policy, and how the trainer's model and the engine's are made of it."""


@pytest.mark.parametrize("kind", ROUTERS)
def test_right_rows_of_a_policy_are_taken_and_wrong_ones_refused(kind: str) -> None:
    name, of_trainer, of_rollout = ROUTERS[kind]
    trainer = of_trainer(policy(name)).train()
    engine = of_rollout(policy(name))
    (batch,) = texts(1, seed=5)
    (other,) = texts(1, seed=6)
    right = {kind: rows_of(engine, batch)}
    table = check(lambda: trainer(batch, use_cache=False), trainer, right, rows_of(engine, other))
    print(f"\n{kind}", *table, sep="\n")


# Families of transformers, with random weights

SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE, top-4 of 32": ("Qwen3Moe", {}),
    "Qwen3-MoE, top-8 of 128": ("Qwen3Moe", {"num_experts": 128, "num_experts_per_tok": 8}),
    "Qwen3-MoE, top-1 of 16": ("Qwen3Moe", {"num_experts": 16, "num_experts_per_tok": 1}),
    "Mixtral, top-2 of 8": ("Mixtral", {"num_hidden_layers": 8}),
    "OLMoE, top-8 of 64": ("Olmoe", {}),
    "DeepSeek-V3, top-6 of 64 in groups": ("DeepseekV3", {}),
}


@pytest.mark.choice
@pytest.mark.parametrize("length", [128, 600])
@pytest.mark.parametrize("size", SIZES)
def test_right_rows_of_a_family_are_taken_and_wrong_ones_refused(size: str, length: int) -> None:
    family, changes = SIZES[size]
    model = make(family, **changes)
    generator = torch.Generator().manual_seed(5)
    tokens, other = torch.randint(3, VOCABULARY, (2, 1, length), generator=generator)
    right = {
        "float32": rows_of(model, tokens),
        "bfloat16": rows_of(copy.deepcopy(model).bfloat16(), tokens),
        "8 bits": rows_of(rounded(copy.deepcopy(model), 8), tokens),
        "4 bits": rows_of(rounded(copy.deepcopy(model), 4), tokens),
    }
    table = check(lambda: model(tokens, use_cache=False), model, right, rows_of(model, other))
    print(f"\n{size}, {length} rows", *table, sep="\n")
