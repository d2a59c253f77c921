"""A job of tests/untouched.py: one of verl's engines and its workers, in one process, on a small model."""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any

import torch.distributed as dist

from untouched import digest

STEPS = 2
ASKED = 1
"""All steps, and those of a job that asks for replay and turns it off then."""


def run(task: dict[str, Any], *, ask: bool) -> dict[str, Any]:
    """Digests of some steps of an actor without a mode; with `ask` it has R2's, until an uninstall()."""
    fsdp = task["engine"] == "fsdp2"
    if fsdp and task["platform"]:
        os.environ.update(VERL_PLATFORM="cpu", VERL_USE_EXTERNAL_MODULES="verl_live.cpu_platform")
    os.environ.update(RANK="0", WORLD_SIZE="1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    from lent.compat import cpu

    with contextlib.nullcontext() if fsdp else cpu.lend():
        job: Any = importlib.import_module("on_verl.fsdp_job" if fsdp else "on_verl.engine_job")
        job.prepare()
        more = {"folder": task["model"]} if fsdp else {"split": job.start(job.Split())}
        return _trained(job, job.Tiny(mode="R2" if ask else "disabled", **more))


def _trained(job: Any, tiny: Any) -> dict[str, Any]:
    import verl

    actor = job.Actor(tiny)
    asks = tiny.mode != "disabled"
    digests: dict[str, Any] = {"log_probs": []}
    for step in range(STEPS):
        if step == ASKED and asks:
            importlib.import_module("npu_replay").uninstall()
            # verl's own replay goes on, which asks for CUDA by name; 0.7's own fails, and is turned off.
            importlib.import_module("verl.utils.megatron.router_replay_utils").device_name = "cpu"
            actor.worker.enable_routing_replay = verl.__version__ >= "0.8"
        data = importlib.import_module("on_verl.engine_job").batch(tiny)
        data.batch["old_log_probs"], routes = actor.log_probs(data)
        assert step or (routes is not None) == asks
        if routes is not None:
            data.batch["routed_experts"] = routes
        actor.update(data)
        digests["log_probs"].append(digest([data.batch["old_log_probs"]]))
    digests["gradients"] = [
        digest(gradients.values() if isinstance(gradients, dict) else gradients)
        for gradients in actor.gradients
    ]
    chunks = actor.chunks if isinstance(actor.chunks, list) else [actor.chunks]
    whole = importlib.import_module("zoo.qwen_sharded").whole
    weights = [whole(weight) for chunk in chunks for weight in chunk.parameters()]
    return digests | {"weights": digest(weights)}
