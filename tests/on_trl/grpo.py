"""TRL's GRPOTrainer on a tiny Qwen3-MoE, and what every router of its model chose, read by hooks of our own.

Nothing of npu_replay is used here: this is the truth that its replay is held against.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen3MoeForCausalLM
from trl import GRPOConfig, GRPOTrainer

from zoo import qwen
from zoo.qwen import TOPK

VOCABULARY = 96
LAYERS = 3
Choice = dict[tuple[int, ...], dict[int, torch.Tensor]]
"""By sequence (its tokens) and layer: the ids, sorted, [tokens, topk]."""


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
        "max_steps": 12,
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


class Seen:
    """What the routers of a model chose in each pass of a run, as their outputs show.

    Attributes:
        recorded: the policy's newest pass without grad.
        reference: the newest pass of the same module with its adapter off.
        updates: token-layers of passes with grad and their recomputes.
        wrong: of these, where the experts aren't those of the policy's own newest pass without grad.
        new: where they aren't those that the routers' scores say.
        other: token-layers in which the reference's own choice differs from the policy's.
    """

    def __init__(self, followed: torch.nn.Module) -> None:
        self.recorded: Choice = {}
        self.updates = self.wrong = self.new = self.other = self.recomputed = self.generated = 0
        self._call: tuple[str, list[tuple[tuple[int, ...], torch.Tensor]]] | None = None
        self._last: Any = None
        self._tuners = [one for one in followed.modules() if hasattr(one, "lora_A")]
        inner = next(one for one in followed.modules() if isinstance(one, Qwen3MoeForCausalLM))
        inner.register_forward_pre_hook(self._begins, with_kwargs=True)
        gates = [one for name, one in inner.named_modules() if name.endswith("mlp.gate")]
        assert len(gates) == LAYERS
        for layer, gate in enumerate(gates):
            gate.register_forward_hook(
                lambda gate, args, out, layer=layer: self._chose(gate, args, out, layer)
            )

    def _begins(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids")
        mask = kwargs.get("attention_mask")
        if any(kwargs.get(name) is not None for name in ("past_key_values", "cache")):  # 5.24 says cache
            self._last = "generation", []
            self.generated += 1
            return
        places = torch.arange(ids.numel()).view_as(ids)
        rows = [
            (tuple(one[keep].tolist()), at[keep])
            for one, keep, at in zip(ids, mask.bool(), places, strict=True)
        ]
        kind = "update" if torch.is_grad_enabled() else "record" if module.training else "evaluation"
        if self._tuners and self._tuners[0].disable_adapters:
            kind = "reference"
        self._last = kind, rows

    def _chose(self, gate: Any, args: Any, out: Any, layer: int) -> None:
        kind, rows = self._last
        ids = next(one for one in out if one.dtype == torch.int64).detach()
        own = (
            torch.nn.functional.linear(args[0].reshape(-1, args[0].shape[-1]), gate.weight).topk(TOPK).indices
        )
        self.recomputed += kind == "update" and torch._C._current_graph_task_id() != -1
        for tokens, at in rows:
            if len(tokens) < 2:
                continue
            chosen = ids[at].sort(1).values
            live = own[at].sort(1).values
            if kind == "record":
                self.recorded.setdefault(tokens, {})[layer] = chosen.clone()
            elif kind == "reference":
                self.other += int((chosen != self.recorded[tokens][layer]).any(1).sum())
                assert torch.equal(chosen, live)
            elif kind == "update":
                self.updates += len(tokens)
                self.wrong += int((chosen != self.recorded[tokens][layer]).any(1).sum())
                self.new += int((live != self.recorded[tokens][layer]).any(1).sum())
