"""Flags, functions and methods of later Megatron-core releases, on the release on the path."""

from __future__ import annotations

import copy
import dataclasses
from importlib import import_module
from math import ceil
from typing import Any

import pytest
import torch

from megatron_cases import build, routers

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]

SIZES = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
ROWS, EXPERTS, TOPK = 12, 6, 2


def config(kind: str, **flags: Any) -> Any:
    return getattr(import_module("megatron.core.transformer.transformer_config"), kind)(**SIZES, **flags)


@pytest.fixture
def moe_utils() -> Any:
    return import_module("megatron.core.transformer.moe.moe_utils")


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(ROWS, EXPERTS, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("kind", ["TransformerConfig", "MLATransformerConfig"])
@pytest.mark.parametrize(
    "flag",
    [
        pytest.param("moe_enable_routing_replay", marks=pytest.mark.capability("flag")),
        pytest.param("enable_routing_replay", marks=pytest.mark.capability("alias")),
    ],
)
def test_a_config_takes_the_flag_and_keeps_it(kind: str, flag: str) -> None:
    off, on = config(kind), config(kind, **{flag: True})
    for name in ("moe_enable_routing_replay", "enable_routing_replay"):
        assert (getattr(off, name), getattr(on, name)) == (False, True)
        with pytest.raises(TypeError, match="unexpected keyword argument 'moe_replay_routing'"):
            config(kind, moe_replay_routing=True)
        assert getattr(copy.deepcopy(on), name) is True
        assert getattr(dataclasses.replace(on, hidden_size=64), name) is True
        assert getattr(dataclasses.replace(on, **{flag: False}), name) is False


@pytest.mark.capability("fusion_flag")
@pytest.mark.parametrize("kind", ["TransformerConfig", "MLATransformerConfig"])
def test_every_config_says_whether_its_router_is_fused(kind: str) -> None:
    assert config(kind).moe_router_fusion is False


@pytest.mark.capability("token_dropping")
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("pad", [False, True], ids=["dropped", "padded"])
def test_token_dropping_keeps_an_experts_best_or_first_tokens(
    moe_utils: Any, logits: torch.Tensor, policy: str, pad: bool
) -> None:
    chosen = logits.topk(TOPK, dim=1).indices
    routing_map = torch.zeros(ROWS, EXPERTS, dtype=torch.bool).scatter(1, chosen, True)
    probs = logits.softmax(dim=1) * routing_map
    kept_probs, kept = moe_utils.apply_router_token_dropping(
        probs, routing_map, router_topk=TOPK, capacity_factor=0.75, drop_policy=policy, pad_to_capacity=pad
    )
    room = ceil(ROWS * TOPK / EXPERTS * 0.75)
    assert torch.equal(kept_probs, probs * kept)
    dropped = 0
    for expert in range(EXPERTS):
        asked = routing_map[:, expert].nonzero().flatten().tolist()
        if policy == "probs":
            asked.sort(key=lambda row: -float(probs[row, expert]))
        mine = set(kept[:, expert].nonzero().flatten().tolist())
        assert mine & set(asked) == set(asked[:room]) if policy == "probs" else len(mine) <= room
        assert len(mine) == (room if pad else min(room, len(asked)))
        dropped += len(set(asked) - mine)
    assert dropped > 0
    wide = EXPERTS / TOPK  # as many places as tokens; 0.14 and 0.15 themselves fail on more
    same_probs, same_map = moe_utils.apply_router_token_dropping(probs, routing_map, TOPK, wide)
    assert torch.equal(same_probs, probs)
    assert torch.equal(same_map, routing_map)


@pytest.mark.capability("aux_scores")
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_aux_losses_scores_are_over_all_experts_and_the_map_is_their_topk(
    moe_utils: Any, logits: torch.Tensor, score: str
) -> None:
    routing_map, scores = moe_utils.compute_routing_scores_for_aux_loss(logits, TOPK, score)
    raw = logits.softmax(dim=-1) if score == "softmax" else logits.sigmoid()
    torch.testing.assert_close(scores, raw / raw.sum(dim=-1, keepdim=True))
    expected = torch.zeros(ROWS, EXPERTS, dtype=torch.bool).scatter(1, logits.topk(TOPK, dim=1).indices, True)
    assert torch.equal(routing_map, expected)
    with pytest.raises(ValueError, match="relu"):
        moe_utils.compute_routing_scores_for_aux_loss(logits, TOPK, "relu")


@pytest.mark.capability("vp_stages")
def test_the_first_and_the_last_virtual_stage() -> None:
    from megatron.core.pipeline_parallel.utils import is_vp_first_stage, is_vp_last_stage

    assert [is_vp_first_stage(stage, 3) for stage in range(3)] == [True, False, False]
    assert [is_vp_last_stage(stage, 3) for stage in range(3)] == [False, False, True]
    for stage, size in ((None, None), (0, None), (None, 1), (0, 1)):
        assert is_vp_first_stage(stage, size) is is_vp_last_stage(stage, size) is True
    for ask in (is_vp_first_stage, is_vp_last_stage):
        with pytest.raises(AssertionError, match="vp_stage=1"):
            ask(1, None)


@pytest.mark.capability("router_methods")
@pytest.mark.parametrize(
    ("kind", "coefficient", "enabled"),
    [("aux_loss", 0.5, True), ("seq_aux_loss", 0.25, True), ("aux_loss", 0.0, False), ("none", 0.5, False)],
)
def test_a_router_says_which_aux_loss_it_has(kind: str, coefficient: float, enabled: bool) -> None:
    changes = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": coefficient}
    for router in (router.module for router in routers(build(changes).model)):
        assert router.is_aux_loss_enabled() is enabled
        for name in ("aux_loss", "seq_aux_loss", "global_aux_loss"):
            assert router.get_aux_loss_coeff(name) == (coefficient if name == kind else 0.0)
