"""docs/routers.md: its routers are recorded and replayed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import routers

TEXT = (Path(__file__).parents[2] / "docs" / "routers.md").read_text(encoding="utf-8")


@pytest.fixture
def example() -> Iterator[dict[str, Any]]:
    """What the page's example leaves behind."""
    names: dict[str, Any] = {}
    torch.manual_seed(0)
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(block, "docs/routers.md", "exec"), names)
    yield names
    routers.unregister("my model")


def test_its_replay_has_an_effect(example: dict[str, Any]) -> None:
    model = example["model"]
    batch = example["batch"]
    (routes,) = example["recording"].routes
    with torch.no_grad():
        for layer in model:
            layer.gate.weight.neg_()
    with npu_replay.observe(model) as free:
        model(batch)
    with npu_replay.observe(model) as seen, npu_replay.replay(model, [routes]):
        model(batch)
    assert npu_replay.compare([routes], free.shown).router_mismatch > 0
    assert npu_replay.compare([routes], seen.shown).router_mismatch == 0


def test_layers_that_differ_are_recorded_and_replayed_part_by_part(example: dict[str, Any]) -> None:
    recorded = [part.routes[0] for part in example["parts"]]
    assert [(one.topk, one.num_experts) for one in recorded] == [(2, 8), (3, 8), (2, 4)]
    assert all(weight.grad is not None for weight in example["pruned"].parameters())
    with pytest.raises(npu_replay.RouterError, match="part by part"), npu_replay.record(example["pruned"]):
        pass
