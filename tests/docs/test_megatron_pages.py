"""The pages about Megatron: their examples run on a real one, in this process."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import npu_replay
from npu_replay.compat import cpu

pytestmark = pytest.mark.megatron
DOCS = Path(__file__).parents[2] / "docs"
LENGTH = 12


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What the examples leave to the reader."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
    from megatron.core.transformer.moe.router_replay import RouterReplay

    from npu_replay.smoke import megatron_model

    # Megatron writes the next scale into the first one, which other tests may have left, of another shape.
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    RouterReplay.clear_global_router_replay_instances()  # of models that other tests have built
    with cpu.lend():
        megatron_model.start(torch.device("cpu"))
        torch.manual_seed(3)
        with mock.patch("megatron.core.transformer.TransformerConfig", dict):
            sizes = megatron_model.config(num_layers=2)
        config = megatron_model.config(num_layers=2)
        config.enable_autocast = False
        model = megatron_model.model(config).train()
        sequences = [torch.randint(0, 64, (LENGTH,)) for _ in range(3)]
        batches = [
            {"input_ids": sequence[None], **megatron_model.causal(sequence[None])} for sequence in sequences
        ]
        with torch.no_grad(), npu_replay.record(model) as recording:
            for batch in batches:
                model(**batch)

        def forward_step(data: Any, model: Any) -> Any:
            return model(**next(data)), lambda scores: (scores.float().mean(), {})

        yield {
            "npu_replay": npu_replay,
            "torch": torch,
            "model": model,
            "forward_step": forward_step,
            "batches": batches,
            "batch": batches[0],
            "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3),
            "micro_batches": [[pair] for pair in zip(sequences, recording.routes, strict=True)],
            "config": config,
            "sizes": sizes,
            "build": partial(megatron_model.model),
        }


def run(page: str, names: dict[str, Any]) -> dict[str, Any]:
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    for block in re.findall(r"(?<!-->\n)```python\n(.*?)```", text, re.DOTALL):
        exec(compile(block, f"docs/{page}.md", "exec"), names)
    return names


def test_a_loop_records_replays_lays_out_and_collects(
    names: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In R3, the second block, old log-probs and update are replayed by the same routes."""
    opened = []
    replay = npu_replay.replay

    def noted(model: Any, routes: Any, **options: Any) -> Any:
        opened.append((torch.is_grad_enabled(), routes))
        return replay(model, routes, **options)

    monkeypatch.setattr(npu_replay, "replay", noted)
    results = run("megatron", names)
    assert [(grad, routes is results["routes"]) for grad, routes in opened] == [
        (True, False),
        (False, True),
        (True, True),
    ]
    assert results["session"].metrics()["micro_batches"] == 3
    assert results["session"].metrics()["rows"] == 3 * LENGTH
    assert [len(routes) for routes in results["sequences"]] == [LENGTH] * 3
    assert all(routes.recorded.all() for routes in results["routes"])


def test_megatrons_own_api_records_and_replays(names: dict[str, Any]) -> None:
    results = run("upstream", names)
    assert [tuple(ids.shape) for ids in results["routes"]] == [(LENGTH, 2)] * 2
    assert all(
        parameter.grad is not None for parameter in results["model"].parameters() if parameter.requires_grad
    )


def test_megatron_runs_without_cuda(names: dict[str, Any]) -> None:
    assert any(parameter.grad is not None for parameter in run("dev/megatron", names)["model"].parameters())
