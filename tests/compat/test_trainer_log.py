"""What a block says of itself is in the log of transformers' own Trainer, and reaches its reporters.

In a whole training: tests/on_trl.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay.compat.trainer_log import log_metrics
from zoo import qwen

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


def test_metrics_are_logged_and_reported_until_they_are_removed(tmp_path: Path) -> None:
    reported: list[dict[str, float]] = []

    class Reporter(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **known: Any) -> None:
            reported.append(dict(logs))

    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    trainer = transformers.Trainer(model=qwen.make(64, 2), args=arguments, callbacks=[Reporter()])
    with npu_replay.pin_recompute(trainer.model) as session:
        callback = log_metrics(trainer, session)
        trainer.model(torch.ones(1, 4, dtype=torch.long))
        trainer.log({"loss": 1.0})
    assert reported[-1]["npu_replay/routers"] == trainer.state.log_history[-1]["npu_replay/routers"] == 2
    trainer.remove_callback(callback)
    trainer.log({"loss": 1.0})
    assert "npu_replay/routers" not in reported[-1]
