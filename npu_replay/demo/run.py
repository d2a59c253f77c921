"""npu-replay demo: rollout, trainer, two tables and one picture."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import npu_replay
from npu_replay import screen
from npu_replay.compat import probe
from npu_replay.demo import megatron_model, tables, vllm_engine
from npu_replay.demo.rollout import qwen3_moe, roll_out
from npu_replay.demo.trainer import Trainer
from npu_replay.demo.weights import like
from npu_replay.devices import megatron_on, one_thread, pick
from npu_replay.options import WrongOption, check_out, write_out
from npu_replay.tables import print_json, show, to_json

JSON, PNG, LOG = "demo.json", "demo.png", "demo.log"


def main(
    *,
    device: str,
    steps: int,
    out: Path,
    seed: int,
    force: bool,
    engine: str = "transformers",
    as_json: bool = False,
) -> dict[str, Any]:
    """Run the demo, print its tables and write demo.json and demo.png into `out`.

    Args:
        engine: what rolls out, "transformers" or "vllm".

    Raises:
        ReplayError: a file is there already and `force` isn't set, or a part is missing.
    """
    probe.require(probe.DEMO, "the demo")
    if engine == "vllm":
        vllm_engine.require()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WrongOption(
            f"the folder can't be made ({error})", where=str(out), cause="another --out is meant"
        ) from error
    for name in (JSON, PNG):
        check_out(out / name, force=force)
    with screen.quiet("demo", out / LOG):
        from npu_replay.inspection import plots

        with one_thread(), megatron_on(where := pick(device)), screen.progress(5) as tell:
            result = run(where, steps, seed, engine, tell)
        if as_json:
            print_json(result)
        else:
            show(tables.parts(result))
        write_out(out / JSON, to_json(result).encode(), force=force)
        write_out(out / PNG, plots.demo(result), force=force)
    return result


def run(
    device: torch.device, steps: int, seed: int, engine: str, advance: Callable[[str], None]
) -> dict[str, Any]:
    """The job itself; `advance` is told of each part that begins."""
    import megatron.core
    import transformers

    megatron_model.start(device)
    if engine == "vllm":
        advance("rollout: Qwen3-MoE in vLLM, bfloat16")
        rollout = qwen3_moe(seed, device, **vllm_engine.SHAPE)
        samples, engine_name = vllm_engine.roll_out(rollout, seed)
    else:
        advance("rollout: Qwen3-MoE of transformers, bfloat16, KV cache")
        rollout = qwen3_moe(seed, device)
        samples, engine_name = roll_out(rollout, seed, device), f"transformers {transformers.__version__}"
    advance("trainer: the same weights in Megatron-core, float32")
    model = like(rollout, device)
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
