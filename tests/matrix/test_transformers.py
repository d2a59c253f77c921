"""record and replay of small models of the transformers on the path."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

import npu_replay
from megatron_cases import same
from npu_replay import RoutedExperts
from npu_replay.routers import find

transformers.logging.set_verbosity_error()

ROOT = Path(__file__).resolve().parents[2]
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
            ids=torch.rand(*one.ids.shape[:2], one.num_experts, generator=generator).topk(one.topk).indices,
            layers=one.layers,
            num_experts=one.num_experts,
        )
        for one in like
    ]


# What is used, seen past npu_replay: the ids that come to the experts


@pytest.fixture(scope="module")
def table() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "ci"))
        return importlib.import_module("models")


BLOCKS = (
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_next",
    "qwen3_omni_moe",
    "qwen3_vl_moe",
    "ernie4_5_moe",
    "flex_olmo",
    "hunyuan_v1_moe",
    "jamba",
    "minimax",
)
"""Those that choose inside their block in 4; all of them make a mask of the ids by `one_hot`."""


@contextlib.contextmanager
def _masked() -> Iterator[list[torch.Tensor]]:
    """What `one_hot` is given, call by call."""
    seen: list[torch.Tensor] = []
    native = torch.nn.functional.one_hot

    def one_hot(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(ids.detach().clone())
        return native(ids, *args, **kwargs)

    with mock.patch("torch.nn.functional.one_hot", one_hot):
        yield seen


@pytest.mark.capability("families")
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize("family", BLOCKS)
def test_the_experts_get_the_routes_in_forward_and_recompute(
    table: Any, family: str, checkpoint: str
) -> None:
    model = table.build(family).train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    if CHECKPOINTS[checkpoint] is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=CHECKPOINTS[checkpoint])
    batches = [torch.randint(1, 60, (2, length)) for length in (6, 9)]
    with npu_replay.record(model) as recording:
        sum(model(input_ids=batch)[0].float().square().mean() for batch in batches).backward()
    routes = foreign(recording.routes)
    with npu_replay.replay(model, routes), _masked() as seen:
        sum(model(input_ids=batch)[0].float().square().mean() for batch in batches).backward()
    wanted = [one.layer_ids(layer).long() for one in routes for layer in one.layers]
    if CHECKPOINTS[checkpoint] is not None:
        wanted += wanted[::-1]  # backward begins with the last layer of the last micro-batch
    assert len(seen) == len(wanted) > 0
    assert all(torch.equal(one.reshape(ids.shape), ids) for one, ids in zip(seen, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.capability("families")
def test_every_family_does_what_the_page_says(table: Any) -> None:
    page = table.PAGE.read_text(encoding="utf-8")
    rows = table.pages.between(page, table.MARKS)
    tried = [table.pages.line(astuple(table.attempt(family))) for family in table.families()]
    assert [line for line in tried if line not in rows] == []
    assert "WRONG" not in rows


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
