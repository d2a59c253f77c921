"""The demo's job: a rollout, and a trainer that takes it with replay and without."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch

import npu_replay
from examples.demo import rollout
from examples.demo.trainer import Trainer
from examples.qwen3_moe.weights import like
from npu_replay.smoke import megatron_model


def run(
    device: torch.device, steps: int, seed: int, engine: str, advance: Callable[[str], None]
) -> dict[str, Any]:
    """Roll out, compare and train; `advance` is told of each part that begins."""
    import megatron.core
    import transformers

    megatron_model.start(device)
    advance(f"rollout: Qwen3-MoE in {engine}, bfloat16")
    theirs, samples, engine_name = rollout.ENGINES[engine](seed, device)
    advance("trainer: the same weights in Megatron-core, float32")
    model = like(theirs, device)
    trainer = Trainer(model, samples, device)
    r3 = trainer.rollout_routes
    sampled = torch.cat([sample.log_probs for sample in samples])
    start = {name: value.clone() for name, value in model.state_dict().items() if torch.is_tensor(value)}

    against: dict[str, Any] = {}
    for name, routes in (("none", None), ("r3", r3)):
        log_probs, shown = trainer.evaluate(routes)
        against[name] = {
            "routing": asdict(npu_replay.compare(r3, shown)),
            "log_probs": asdict(npu_replay.compare(sampled, log_probs)),
            "differences": (log_probs - sampled).tolist(),
        }
    live, r2 = trainer.old_log_probs()
    updates: dict[str, Any] = {}
    for name, title, old, routes in (
        ("none", "without replay", live, None),
        ("r2", "with R2", live, r2),
        ("r3", "with R3", log_probs, r3),
    ):
        advance(f"{steps} optimizer steps, {title}")
        model.load_state_dict(start, strict=False)
        updates[name] = trainer.update(old, routes, steps)
    return {
        "settings": {"seed": seed, "steps": steps, "device": str(device), "tokens": len(sampled)},
        "versions": {
            "rollout": engine_name,
            "npu_replay": npu_replay.__version__,
            "torch": torch.__version__,
            "megatron-core": megatron.core.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "rollout_against_trainer": against,
        "updates": updates,
    }
