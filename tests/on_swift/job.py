"""ms-swift's own GRPO trainer, whole, on a tiny Qwen3-MoE, and a rollout's routes that are made up.

Its engine gives none on a CPU, so each sample gets random ones as it is encoded: no router would choose them.
All else is ms-swift's: generation, collate, passes, optimizer. Truth is what a hook on every router sees.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch

from zoo import qwen
from zoo.passes import Passes, differing
from zoo.qwen import EXPERTS, TOPK

VOCABULARY = 96
LAYERS = 3
FIGURES = ("count", "replayed", "wrong", "free", "updates", "otherwise", "recomputed")
PLUGIN = """
from swift.rewards import ORM, orms

class Words(ORM):
    def __call__(self, completions, **kwargs):
        return [float(sum(map(ord, text)) % 7) for text in completions]

orms["words"] = Words
"""


def write_model(folder: Path) -> None:
    """A model with its tokenizer, and prompts for it."""
    words = ["<|endoftext|>", "<|im_end|>", "<|im_start|>", "<unk>"]
    words += [f"w{number}" for number in range(4, VOCABULARY)]
    special = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    qwen.tokenizer(words, **special).save_pretrained(folder)
    qwen.make(VOCABULARY, LAYERS, pad_token_id=0, eos_token_id=1).save_pretrained(folder)
    prompts = [" ".join(f"w{4 + (7 * n + k) % 90}" for k in range(2 + n % 4)) for n in range(16)]
    lines = (json.dumps({"messages": [{"role": "user", "content": prompt}]}) for prompt in prompts)
    (folder / "prompts.jsonl").write_text("\n".join(lines), encoding="utf-8")


class Rollout:
    """Routes of samples, by their tokens: what the trainer's routers have to choose."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.last: bool = task.get("last", False)
        self._missing = task.get("missing", False)
        self._cut = task.get("cut", 0)
        self.routes: dict[tuple[int, ...], torch.Tensor] = {}

    def give(self, sample: Any, tokens: list[int]) -> None:
        """[tokens, layers, topk], as vLLM's arrays are; the last token may have none."""
        seed = random.Random(str(tokens)).randrange(2**31)
        generator = torch.Generator().manual_seed(seed)
        scores = torch.rand(len(tokens), LAYERS, EXPERTS, generator=generator)
        whole = scores.topk(TOPK).indices.sort(-1).values
        self.routes[tuple(tokens)] = whole
        if not (self._missing and len(self.routes) % 5 == 3):
            end = len(tokens) - (not self.last) - self._cut
            sample.routed_experts = whole[:end].to(torch.int16).numpy()


class Seen(Passes):
    """What the routers of a model chose.

    Attributes:
        replayed, wrong: token-layers of policy passes with a rollout's route; those that chose otherwise.
        free: token-layers of other passes that chose as the rollout did.
    """

    replayed = wrong = free = 0

    def __init__(self, model: Any, rollout: Rollout) -> None:
        super().__init__(model)
        self._rollout = rollout

    def chose(self, layer: int, tokens: tuple[int, ...], chosen: torch.Tensor, live: torch.Tensor) -> None:
        if (routes := self._rollout.routes.get(tokens)) is None:
            return
        end = len(tokens) - (not self._rollout.last)
        others = differing(chosen[:end], routes[:end, layer])
        if self.kind in ("record", "update"):
            self.replayed += end
            self.wrong += others
        else:
            self.free += end - others


def run(task: dict[str, Any]) -> dict[str, Any]:
    """A whole run, with ms-swift's own arguments; what it showed."""
    folder = Path(task["folder"])
    write_model(folder)
    plugins = [folder / f"{name}.py" for name in ("words", "replay")]
    for path, text in zip(plugins, (PLUGIN, task["plugin"]), strict=True):
        path.write_text(text, encoding="utf-8")

    from swift.arguments import RLHFArguments
    from swift.pipelines import rlhf_main
    from swift.rlhf_trainers import grpo_trainer

    rollout = Rollout(task)
    seen: list[Seen] = []
    prepare = grpo_trainer.GRPOTrainer._prepare_batch_inputs
    encode = grpo_trainer.encode_sample

    def prepared(self: Any, samples: Any) -> Any:
        if not seen:
            seen.append(Seen(self.model, rollout))
        return prepare(self, samples)

    def encoded(sample: Any, template: Any) -> Any:
        inputs = encode(sample, template)
        if task.get("routes", True):
            rollout.give(sample, list(inputs["input_ids"]))
        return inputs

    grpo_trainer.GRPOTrainer._prepare_batch_inputs = prepared
    grpo_trainer.encode_sample = encoded
    if task["options"].get(
        "padding_free"
    ):  # only flash attention may, which has no CPU; sdpa has a mask for it
        RLHFArguments._check_padding_free = lambda self: None
    options = {
        "per_device_train_batch_size": 4,
        "num_generations": 2,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "max_completion_length": 8,
        "max_steps": 8,
        "learning_rate": 0.03,
        "tuner_type": "full",
        "gradient_checkpointing": True,
        "attn_impl": "sdpa",
    }
    problem = ""
    try:
        rlhf_main(
            RLHFArguments(
                rlhf_type="grpo",
                model=str(folder),
                model_type="qwen3_moe",
                template="chatml",
                torch_dtype="float32",
                dataset=[str(folder / "prompts.jsonl")],
                split_dataset_ratio=0,
                external_plugins=[str(path) for path in plugins],
                reward_funcs=["words"],
                use_vllm=False,
                use_hf=True,
                output_dir=str(folder / "out"),
                report_to=[],
                save_strategy="no",
                logging_steps=1,
                **options | task["options"],
            )
        )
    except Exception as error:  # whatever ends a run
        problem = f"{type(error).__name__}: {error}"
    figures = {name: getattr(witness, name) for witness in seen for name in FIGURES}
    return figures | {"problem": problem}
