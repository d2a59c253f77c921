"""TRL's own GRPOTrainer trains with R2 by `follow`: each update takes the experts of its old log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay.compat.trainer_log import log_metrics
from zoo import qwen
from zoo.passes import Passes, differing

pytest.importorskip("trl", reason="ci/trainers.sh runs these tests, with TRL")

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*requires_grad=True:UserWarning"),
]

VOCABULARY = 96
LAYERS = 3


def tokenizer() -> Any:
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(3, VOCABULARY))]
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return qwen.tokenizer(words, **special, padding_side="left")


def prompts() -> Dataset:
    return Dataset.from_dict(
        {"prompt": [" ".join(f"w{3 + (7 * n + k) % 90}" for k in range(2 + n % 4)) for n in range(16)]}
    )


def rewards(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def trainer(folder: Path, peft: Any = None, **options: Any) -> GRPOTrainer:
    """Old log-probs are taken in a pass of their own, and each generation is trained on twice."""
    chosen = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
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


CASES: dict[str, dict[str, Any]] = {
    "checkpointing": {},
    "reentrant": {"gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "none": {"gradient_checkpointing": False},
    "other micro-batches": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
    "aux loss": {"router_aux_loss_coef": 0.01},
}


def with_lora() -> dict[str, Any]:
    from peft import LoraConfig

    lora = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "o_proj"])
    return {"peft": lora, "beta": 0.1, "learning_rate": 0.1}


@pytest.mark.parametrize(
    ("case", "adapter"),
    [
        *(("checkpointing", False), ("checkpointing", True), ("reentrant", False)),
        *(("none", True), ("other micro-batches", False), ("aux loss", True)),
    ],
)
def test_updates_take_the_experts_of_the_old_log_probs(case: str, adapter: bool, tmp_path: Path) -> None:
    grpo = trainer(tmp_path, **CASES[case] | (with_lora() if adapter else {}))
    seen = Seen(grpo.model)
    with npu_replay.follow(grpo.model, live_mismatch=True) as following:
        log_metrics(grpo, following)
        grpo.train()
        metrics = following.metrics()
    logged = [entry for entry in grpo.state.log_history if "loss" in entry]
    assert len(logged) == grpo.args.max_steps
    assert logged[-1]["npu_replay/replayed"] == metrics["replayed"]
    assert seen.updates > 1000
    assert seen.otherwise == 0
    assert seen.new > seen.updates / 10  # what a run without it would have chosen otherwise
    assert (seen.recomputed > 0) == (case != "none")
    assert metrics["recorded"] * 2 == metrics["replayed"]  # num_iterations
    assert seen.count["generation"] > 0
    if adapter:
        assert seen.other > 100  # the reference's routers chose by themselves, and otherwise
        assert following.left_alone["of another variant of the model (adapters)"] > 0
        assert len(following.left_alone) == 1  # generate() goes past PeftModel's __call__
    else:
        assert seen.count["generation"] == sum(following.left_alone.values())
    assert metrics["routers"] == LAYERS


def test_a_run_without_it_chooses_otherwise(tmp_path: Path) -> None:
    """The control: its own figures count, and the routers do move."""
    grpo = trainer(tmp_path, **with_lora())
    seen = Seen(grpo.model)
    grpo.train()
    assert seen.otherwise == seen.new > seen.updates / 10


def test_a_run_without_old_log_probs_is_told_so(tmp_path: Path) -> None:
    grpo = trainer(tmp_path, num_iterations=1, steps_per_generation=1, max_steps=2)
    with (
        pytest.raises(npu_replay.MicroBatchError, match=r"no pass for old log-probs.*TRL leaves it out"),
        npu_replay.follow(grpo.model),
    ):
        grpo.train()


def test_routes_of_a_rollout_are_replayed_in_both_passes(tmp_path: Path) -> None:
    """R3: what is put in by tokens, where TRL's own generation has just ended."""
    grpo = trainer(tmp_path, max_steps=4)
    seen = Seen(grpo.model)
    put: dict[tuple[int, ...], torch.Tensor] = {}
    generate = grpo._generate_single_turn

    def generated(*args: Any, **kwargs: Any) -> Any:
        answer = generate(*args, **kwargs)
        for prompt, completion in zip(args[0], answer[0], strict=True):
            tokens = [*prompt, *completion]
            ids = torch.rand(len(tokens) - 1, LAYERS, 8).topk(2).indices  # the last token has no route
            put[tuple(tokens)] = ids.sort(2).values
            routes = npu_replay.RoutedExperts(ids=ids, layers=range(LAYERS), num_experts=8)
            following.put(routes, tokens)
        return answer

    grpo._generate_single_turn = generated
    with npu_replay.follow(grpo.model) as following:
        grpo.train()
        metrics = following.metrics()
    assert metrics["recorded"] == 0
    assert put
    for tokens, layers in seen.recorded.items():
        for layer, chosen in layers.items():
            assert torch.equal(chosen[:-1], put[tokens][:, layer])
    assert seen.otherwise <= LAYERS * metrics["replayed"]  # the last tokens, which choose by themselves
