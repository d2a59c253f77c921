"""R2 as it is meant: old log-probs and update under the same routes."""

from __future__ import annotations

import pytest
import torch

import npu_replay
from megatron_cases import Trainer, build
from npu_replay import RoutedExperts
from npu_replay.smoke.megatron_model import causal

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron")]


def log_probs(trainer: Trainer) -> list[torch.Tensor]:
    with torch.no_grad():
        return [-trainer.model(**inputs(tokens)).float() for tokens in trainer.batches]


def inputs(tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "input_ids": tokens,
        "labels": tokens.roll(-1, 1),
        **causal(tokens),
    }


@pytest.mark.parametrize("recompute", [None, "full"])
def test_the_ratio_of_an_unchanged_policy_is_exactly_one_under_its_own_routes(recompute: str | None) -> None:
    """R2 proper: old log-probs under foreign routes; only their replay gives a ratio of 1."""
    trainer = build({}, recompute)
    with npu_replay.record(trainer.model) as recording:
        log_probs(trainer)
    generator = torch.Generator().manual_seed(0)
    foreign = [
        RoutedExperts(
            ids=torch.rand(*r.ids.shape[:2], 8, generator=generator).topk(2).indices,
            layers=r.layers,
            num_experts=8,
        )
        for r in recording.routes
    ]
    with npu_replay.replay(trainer.model, foreign):
        old = log_probs(trainer)
    with npu_replay.replay(trainer.model, foreign):
        new = log_probs(trainer)
    live = log_probs(trainer)
    for before, replayed, alone in zip(old, new, live, strict=True):
        assert bool(((replayed - before).exp() == 1).all())
        ratio = npu_replay.compare(before, alone)
        assert not ratio.ratio_min == 1 == ratio.ratio_max
        assert ratio.kl > 0
