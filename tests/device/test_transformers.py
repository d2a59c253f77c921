"""Real transformers models on an accelerator: what their routers do there is the CPU's, and is replayed."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import npu_replay
from zoo.hugging_face import RECOMPUTE, build, foreign, train
from zoo.outcome import check_own_record

pytestmark = [pytest.mark.accelerator, pytest.mark.slow]

FAMILIES = ("deepseek_v3-4-groups", "qwen3_moe", "mixtral")


@pytest.mark.choice(every=5)
@pytest.mark.parametrize("recompute", RECOMPUTE, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_record_and_replay_repeat_the_run_and_the_cpus(
    family: str, recompute: str | None, device: torch.device
) -> None:
    model = build(family, recompute, experts="eager", num_hidden_layers=2)
    routes = foreign(model)
    with npu_replay.replay(model, routes):
        expected = train(model)
    model.to(device)
    check_own_record(model, partial(train, model))
    with npu_replay.observe(model) as seen, npu_replay.replay(model, routes):
        outcome = train(model)
    for tensor, other in zip(outcome, expected, strict=True):
        assert (tensor is None) == (other is None)
        if tensor is not None:
            assert tensor.device.type == device.type
            torch.testing.assert_close(tensor.cpu(), other, rtol=1e-3, atol=1e-5)
    assert npu_replay.compare(seen.shown, routes).differing == 0
