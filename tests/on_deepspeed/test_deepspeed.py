"""DeepSpeed's ZeRO over two processes: `record` and `replay` around its engine, or the module in it. And its
non-reentrant checkpoint around model and loss: a recompute takes its own forward's experts.
"""

from __future__ import annotations

import os
import traceback
from typing import Any

import pytest
import torch

import jobs
import npu_replay
from live.families import make
from zoo.outcome import gradients, same
from zoo.toys import ToyModel, foreign, tokens

os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed picks its device when it is imported
deepspeed = pytest.importorskip("deepspeed", reason="ci/trainers.sh trl runs these tests, with DeepSpeed")

CASES = {
    "stage 0": (0, False, None),
    "stage 2, checkpoint": (2, False, False),
    "stage 3": (3, False, None),
    "stage 3, leaf modules, checkpoint": (3, True, False),
    "stage 3, leaf modules, reentrant checkpoint": (3, True, True),
}


@pytest.mark.distributed
@pytest.mark.timeout(300)
def test_every_stage_uses_the_recorded_experts_in_forward_and_recompute() -> None:
    problems = jobs.by_case("on_deepspeed.test_deepspeed:main", 2)
    assert problems == {case: ["", ""] for case in CASES}


def main(task: dict[str, Any]) -> dict[str, str]:
    """Return what went wrong with each case; empty where nothing did."""
    os.environ.update(LOCAL_RANK=str(task["rank"]), LOCAL_SIZE=str(task["world"]))
    # It would compile its operator of shared memory, for a minute; without it all goes over gloo.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    problems = {}
    for name, case in CASES.items():
        problems[name] = ""
        try:
            for around in ("engine", "module"):
                train(*case, around)
        except Exception:
            problems[name] = traceback.format_exc()
            break  # the ranks part for good where it goes wrong on one
    torch.distributed.destroy_process_group()
    return problems


def train(stage: int, leaf: bool, reentrant: bool | None, around: str) -> None:
    """Hold the ids that the experts get, in forwards and recomputes, against those that were recorded."""
    torch.manual_seed(0)
    model = make(
        "Qwen3Moe", num_hidden_layers=3, num_experts=8, num_experts_per_tok=2, mlp_only_layers=[0]
    ).train()
    blocks = [layer.mlp for layer in model.model.layers[1:]]
    if reentrant is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    if leaf:
        deepspeed.utils.set_z3_leaf_modules(model, [type(blocks[0])])
    engine, *_ = deepspeed.initialize(
        model=model,
        config={
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        },
    )
    seen: list[torch.Tensor] = []
    for block in blocks:
        block.experts.register_forward_pre_hook(
            lambda _, args: seen.append(next(arg for arg in args if not arg.is_floating_point()).clone())
        )
    tokens = torch.randint(0, 64, (2, 10))
    target = engine if around == "engine" else engine.module
    with torch.no_grad(), npu_replay.record(target) as recording:
        engine(tokens)
    (routes,) = recording.routes
    wanted = [routes.layer_ids(layer).sort().values for layer in routes.layers]
    for _ in range(2):
        with npu_replay.replay(target, [routes], live_mismatch=True) as session:
            seen.clear()
            loss = engine(tokens, labels=tokens).loss
            engine.backward(loss)
        engine.step()
        shown = [ids.sort().values for ids in seen]
        recomputed = [] if reentrant is None else wanted[::-1]
        assert len(shown) == len(wanted) + len(recomputed), f"{len(shown)} calls of experts"
        for got, ids in zip(shown, [*wanted, *recomputed], strict=True):
            assert torch.equal(got.to(ids.dtype), ids)
    assert session.metrics()["live_mismatch"] > 0.05, "the weights haven't moved"


COUNT = 6


@pytest.mark.usefixtures("toy_routers")
def test_a_recompute_takes_the_experts_of_its_own_forward() -> None:
    model = ToyModel()
    scale = torch.ones((), requires_grad=True)

    def loss_of(batch: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean() * scale

    grads: list[Any] = []
    for run in (lambda function, *args: function(*args), deepspeed.checkpointing.non_reentrant_checkpoint):
        model.zero_grad()
        with npu_replay.replay(model, foreign(COUNT)):
            losses = [run(loss_of, batch, scale) for batch in map(tokens, range(COUNT - 1))]
            with torch.no_grad():
                model(tokens(COUNT))  # a metric: of another micro-batch, with as many tokens
            for loss in losses:
                loss.backward()
        grads.append(gradients(model))
    assert same(*grads)
