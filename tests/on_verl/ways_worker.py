"""Jobs of two Ray workers, as verl makes them: what npu_replay has changed in each.

The task: the variables of ray_kwargs.ray_init.runtime_env.env_vars as `runtime_env`, and `jobs`, a list of

    env             variables of these workers alone
    external_lib    run verl's own init_model with actor_rollout_ref.model.external_lib=npu_replay
    lines           lines of that job's config
    uninstall       then undo npu_replay's changes in every worker
"""

from __future__ import annotations

import os
import sys
import time
from importlib import import_module
from typing import Any

MODULES = (
    "verl.utils.megatron.router_replay_patch",
    "verl.workers.engine.megatron.transformer_impl",
    "verl.workers.megatron_workers",
    "verl.workers.engine_workers",
)
"""What a training worker imports; one of the last two is verl 0.7's alone."""


def main(task: dict[str, Any]) -> list[dict[str, Any]]:
    import ray

    ray.init(
        num_cpus=2,  # one a worker, as in the pool below
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": task["runtime_env"]},
    )
    from verl.single_controller.ray import RayResourcePool

    pool = RayResourcePool([2], use_gpu=False, max_colocate_count=1)
    answers = [run(job, pool) for job in task["jobs"]]
    ray.shutdown()
    return answers


def run(task: dict[str, Any], pool: Any) -> dict[str, Any]:
    """One job's workers, until they have answered."""
    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

    cls = RayClassWithInitArgs(ray.remote(worker_class()))
    group = RayWorkerGroup(pool, cls, device_name="cpu", worker_env=task.get("env", {}))
    if "external_lib" in task:
        from verl_configs import job

        task["config"] = job(task["lines"]).actor_rollout_ref
    answer = {"workers": group.execute_all_sync("found", task)}
    if task.get("uninstall"):
        import npu_replay

        # The whole recipe: every worker of verl's has this method.
        group.execute_all_sync("execute_with_func_generator", lambda worker: npu_replay.uninstall())
        answer["after"] = group.execute_all_sync("found", {})
    time.sleep(1)  # what they have logged comes with a delay
    for worker in group.workers:
        ray.kill(worker)
    return answer


def worker_class() -> type:
    """Made here, so that Ray sends it whole: only what it inherits is imported in a worker, as in a job."""
    from verl.single_controller.base.worker import Worker

    class Asked(Worker):
        def found(self, task: dict[str, Any]) -> dict[str, Any]:
            return found(task)

    import ray.cloudpickle

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    return Asked


def found(task: dict[str, Any]) -> dict[str, Any]:
    """In a worker: import what a training worker imports, and report."""
    before = "npu_replay" in sys.modules
    modules = [module for name in MODULES if (module := _imported(name))]
    stopped = _init_model(task) if "external_lib" in task else ""
    replays = {
        module.__name__: module.RouterReplay.__module__
        for module in modules
        if hasattr(module, "RouterReplay")
    }
    changed = []
    if "npu_replay" in sys.modules:
        changed = [patch.where for patch in sys.modules["npu_replay"].report().patches]
    return {
        "pid": os.getpid(),
        "imported_with_verl": before,
        "replays": replays,
        "changed": changed,
        "stopped": stopped,
    }


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def _init_model(task: dict[str, Any]) -> str:
    """verl's own init_model, until the first thing that needs a model or a device. What did it raise?"""
    legacy = task["external_lib"] == "legacy"
    workers = import_module("verl.workers.megatron_workers" if legacy else "verl.workers.engine_workers")
    worker = object.__new__(workers.ActorRolloutRefWorker)
    worker.config, worker.role = task["config"], "actor_rollout"
    worker._is_actor, worker._is_ref, worker.enable_routing_replay = True, False, False
    worker.distillation_enabled = False
    worker._omega_profiler_config = {}
    workers.TrainingWorker = worker.actor_worker_cls = _NoTrainingWorker
    try:
        worker.init_model()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


class _NoTrainingWorker:
    """Where verl's would make an engine: what init_model asks of it next."""

    def __init__(self, config: Any) -> None: ...

    def reset(self) -> None: ...

    def set_loss_fn(self, loss_fn: Any) -> None: ...

    def get_dispatch_collect(self) -> dict[str, Any]:
        return {"dispatch_dp_rank": {}, "collect_dp_rank": {}}
