"""TRL's GRPOTrainer on a tiny Qwen3-MoE, and what every router of its model chose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from zoo import qwen
from zoo.passes import Passes, differing

VOCABULARY = 96
LAYERS = 3


def tokenizer() -> Any:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(3, VOCABULARY))]
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return qwen.tokenizer(words, **special, padding_side="left")


def prompts(count: int = 16) -> Dataset:
    return Dataset.from_dict(
        {"prompt": [" ".join(f"w{3 + (7 * n + k) % 90}" for k in range(2 + n % 4)) for n in range(count)]}
    )


def rewards(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def trainer(folder: Path, peft: Any = None, evaluate: bool = False, **options: Any) -> GRPOTrainer:
    """Old log-probs are taken in a pass of their own, and each generation is trained on twice."""
    chosen = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "num_generations": 2,
        "num_iterations": 2,
        "steps_per_generation": 2,
        "max_completion_length": 8,
        "max_steps": 8,
        "learning_rate": 0.03,
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "gradient_checkpointing": True,
        "seed": 1,
    }
    return GRPOTrainer(
        model=qwen.make(VOCABULARY, LAYERS, pad_token_id=0, eos_token_id=1),
        reward_funcs=rewards,
        args=GRPOConfig(**(chosen | options)),
        train_dataset=prompts(),
        eval_dataset=prompts(4) if evaluate else None,
        processing_class=tokenizer(),
        peft_config=peft,
    )


class Seen(Passes):
    """What the routers of a model chose in each pass of a run.

    Attributes:
        new: token-layers of updates whose recorded experts aren't those that the routers' scores say.
        other: token-layers in which the reference's own choice differs from the policy's.
    """

    new = other = 0

    def chose(self, layer: int, tokens: tuple[int, ...], chosen: torch.Tensor, live: torch.Tensor) -> None:
        if self.kind == "reference":
            self.other += differing(chosen, self.recorded[tokens][layer])
            assert torch.equal(chosen, live)
        elif self.kind == "update":
            self.new += differing(live, self.recorded[tokens][layer])
