"""npu-replay demo: rollout, trainer, two tables and one picture."""

from __future__ import annotations

import contextlib
import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import npu_replay
from npu_replay.compat import probe
from npu_replay.demo import megatron_model, trainer, weights
from npu_replay.demo.rollout import qwen3_moe, roll_out
from npu_replay.devices import megatron_on, one_thread, pick
from npu_replay.errors import ReplayError
from npu_replay.routes.file import check_place, write_whole

JSON, PNG = "demo.json", "demo.png"


def main(*, device: str, steps: int, out: Path, seed: int, force: bool) -> dict[str, Any]:
    """Run the demo, print its tables and write demo.json and demo.png into `out`.

    Raises:
        ReplayError: a file is there already and `force` isn't set, or a part is missing.
    """
    probe.require(probe.DEMO, "the demo")
    for name in (JSON, PNG):
        check_place(_made(out) / name, overwrite=force)
    from npu_replay.demo import tables
    from npu_replay.inspection import plots
    from npu_replay.tables import terminal

    console = terminal()
    with contextlib.ExitStack() as stack:
        stack.enter_context(one_thread())
        where = pick(device)
        stack.enter_context(megatron_on(where))
        result = run(where, steps, seed, tables.progress(stack, console, steps))
    for table in tables.tables(result):
        console.print(table)
    write_whole(out / JSON, json.dumps(result, indent=1).encode(), overwrite=force)
    write_whole(out / PNG, plots.demo(result), overwrite=force)
    console.print(f"Wrote {out / JSON} and {out / PNG}", soft_wrap=True)
    return result


def run(device: torch.device, steps: int, seed: int, advance: Any = lambda *_: None) -> dict[str, Any]:
    """The job itself; `advance` is told of each part that begins and of each step."""
    megatron_model.start(device)
    advance("rollout: Qwen3-MoE of transformers, bfloat16, KV cache")
    rollout = qwen3_moe(seed, device)
    samples = roll_out(rollout, seed, device)
    advance("trainer: the same weights in Megatron-core, float32")
    model = weights.trainer_like(
        rollout, device, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )
    batches = trainer.micro_batches(samples, device)
    r3 = trainer.rollout_routes(samples, batches)
    sampled = torch.cat([sample.log_probs for sample in samples])
    start = {name: value.clone() for name, value in model.state_dict().items() if torch.is_tensor(value)}

    against: dict[str, Any] = {}
    replayed: dict[str, torch.Tensor] = {}
    for name, routes in (("none", None), ("r3", r3)):
        seen = trainer.evaluate(model, batches, routes)
        replayed[name] = seen.log_probs
        against[name] = {
            "routing": asdict(npu_replay.compare(r3, seen.shown)),
            "log_probs": asdict(npu_replay.compare(sampled, seen.log_probs)),
            "differences": (seen.log_probs - sampled).tolist(),
        }
    live, r2 = trainer.old_log_probs(model, batches)
    updates: dict[str, Any] = {}
    for name, old, routes in (("none", live, None), ("r2", live, r2), ("r3", replayed["r3"], r3)):
        advance(f"{steps} optimizer steps, {_TITLES[name]}")
        model.load_state_dict(start, strict=False)
        updates[name] = asdict(trainer.update(model, batches, old, routes, steps, advance))
    return {
        "settings": {"seed": seed, "steps": steps, "device": str(device), "tokens": len(sampled)},
        "versions": _versions(),
        "rollout_against_trainer": against,
        "updates": updates,
    }


_TITLES = {"none": "without replay", "r2": "with R2", "r3": "with R3"}


def _versions() -> dict[str, str]:
    import megatron.core
    import transformers

    return {
        "npu_replay": npu_replay.__version__,
        "torch": torch.__version__,
        "megatron-core": megatron.core.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _made(folder: Path) -> Path:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReplayError(
            f"the folder can't be made ({error})", where=str(folder), cause="another --out is meant"
        ) from error
    return folder
