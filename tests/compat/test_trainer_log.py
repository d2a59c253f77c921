"""What a block says of itself is in the log of transformers' own Trainer, and reaches its reporters."""

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


def test_metrics_are_logged_and_reported(tmp_path: Path) -> None:
    reported: list[dict[str, float]] = []

    class Reporter(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **known: Any) -> None:
            reported.append(dict(logs))

    rows = [{"input_ids": one, "labels": one} for one in torch.randint(2, 60, (6, 9))]
    wanted = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 2,
        "max_steps": 3,
        "logging_steps": 1,
    }
    wanted |= {"use_cpu": True, "report_to": [], "save_strategy": "no", "gradient_checkpointing": True}
    trainer = transformers.Trainer(
        model=qwen.make(64, 2),
        args=transformers.TrainingArguments(**wanted),
        train_dataset=rows,
        callbacks=[Reporter()],
    )
    with npu_replay.pin_recompute(trainer.model) as session:
        handle = log_metrics(trainer, session)
        trainer.train()
    for logs in (reported, trainer.state.log_history):
        steps = [one for one in logs if "loss" in one]
        assert [one["npu_replay/micro_batches"] for one in steps] == [1, 2, 3]
        assert {one["npu_replay/routers"] for one in steps} == {2}
    handle.remove()
    trainer.log({"loss": 1.0})
    assert "npu_replay/routers" not in reported[-1]
