"""Jobs of Ray workers, as verl makes them: what npu_replay has changed in each.

The task of `main`: the variables of ray_kwargs.ray_init.runtime_env.env_vars as `runtime_env`, and `jobs`, a
list of

    workers         how many
    env             variables of these workers alone

The task of `late`, without Ray: the folder of a `model`, and by their names `jobs` that run verl's own
init_model with actor_rollout_ref.model.external_lib=npu_replay:

    external_lib    in which workers, 0.7's "legacy" ones or others
    lines           lines of that job's config
    trainer         whose config that is, by its name; if not said Megatron's
"""

from __future__ import annotations

import contextlib
import multiprocessing
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
ALSO = (
    "verl.experimental.agent_loop.agent_loop",
    "verl.trainer.ppo.ray_trainer",
    "verl.workers.engine.fsdp.transformer_impl",
    "megatron.core.transformer.moe.router",
)
"""What other processes of a job import."""


def main(task: dict[str, Any]) -> dict[str, Any]:
    import ray
    import ray.cloudpickle

    ray.init(
        num_cpus=3,  # one a worker, as in the pools below
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": task["runtime_env"]},
    )
    from verl.single_controller.ray import RayResourcePool

    # Ray sends what is in here whole: only what it needs is imported in a worker, as in a job.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    pools = {count: RayResourcePool([count], use_gpu=False, max_colocate_count=1) for count in (1, 2)}
    answers = [run(job, pools[job["workers"]]) for job in task["jobs"]]
    ray.shutdown()
    return {"jobs": answers}


def run(task: dict[str, Any], pool: Any) -> list[dict[str, Any]]:
    """One job's workers, until they have answered."""
    import ray
    from verl.single_controller.base.worker import Worker
    from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup

    class Asked(Worker):
        def found(self, task: dict[str, Any]) -> dict[str, Any]:
            return found(task)

    cls = RayClassWithInitArgs(ray.remote(Asked))
    group = RayWorkerGroup(pool, cls, device_name="cpu", worker_env=task["env"])
    answers: list[dict[str, Any]] = group.execute_all_sync("found", task)
    time.sleep(3)  # what they have logged comes with a delay
    for worker in group.workers:
        ray.kill(worker)
    return answers


def late(task: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Workers that are started without npu_replay and have imported verl, each a fork of this process."""
    from verl_configs import job

    for name in MODULES:
        _imported(name)
    for one in task["jobs"].values():
        lines = {"actor_rollout_ref.model.path": task["model"], **one["lines"]}
        name = one.get("trainer", "ppo_megatron_trainer")
        one["config"] = job(lines, trainer=name).actor_rollout_ref
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return dict(zip(task["jobs"], pool.map(found, task["jobs"].values(), chunksize=1), strict=True))


def found(task: dict[str, Any]) -> dict[str, Any]:
    """In a worker: import what a training worker imports, and report."""
    before = "npu_replay" in sys.modules
    modules = [module for name in MODULES if (module := _imported(name))]
    stopped = _init_model(task) if "external_lib" in task else ""
    replays = {
        module.__name__: module.RouterReplay.set_global_router_replay_action.__code__.co_filename
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


def by_entry_point(task: dict[str, Any]) -> dict[str, Any]:
    """What is changed once verl's entry point and verl are there, then by what a worker reads in its config.

    It is each of the task's "modes", or for a worker of agent loops each of "with_routes". Last, what an
    install() of everything changes.
    """
    import npu_replay_autoload

    npu_replay_autoload.load("verl")
    import npu_replay
    from npu_replay.compat.verl import config as verl_config
    from verl_configs import FLAG, NEW, job

    modules = {name: _imported(name) for name in (*MODULES, *ALSO)}

    def changed() -> list[str]:
        return sorted({patch.where for patch in npu_replay.report().patches})

    found = {"loaded": changed()}
    for mode in task.get("modes", ()):
        worker = object.__new__(modules["verl.workers.engine_workers"].ActorRolloutRefWorker)
        worker.config = job({NEW: mode}).actor_rollout_ref
        worker.role = "actor"
        verl_config._check_worker(worker, False)
        found[mode] = changed()
    for asked in task.get("with_routes", ()):
        with contextlib.suppress(TypeError, AttributeError, ValueError):  # it lacks its other arguments
            modules[ALSO[0]].AgentLoopWorker(job({FLAG: asked}))
        found[str(asked)] = changed()
    npu_replay.install()
    return found | {"all": changed()}


def broken(task: dict[str, Any]) -> dict[str, list[str]]:
    """What verl's workers raise where npu_replay can't be imported, by each of the task's "places" of a mode:
    without a mode and with R3."""
    sys.modules["npu_replay"] = None  # type: ignore[assignment]  its import fails
    import_module("npu_replay_autoload.verl")
    workers = import_module("verl.workers.engine_workers")
    omegaconf = import_module("omegaconf").OmegaConf
    raised: dict[str, list[str]] = {place: [] for place in task["places"]}
    for mode in ("disabled", "R3"):
        for place in task["places"]:
            replay = {"router_replay": {"mode": "disabled"}}
            actor = {"strategy": "megatron", "megatron": replay}
            config = omegaconf.create({"actor": actor, "rollout": {}})
            omegaconf.update(config, f"actor.{place}.mode", mode, force_add=True)
            try:
                workers.ActorRolloutRefWorker(config=config, role="actor")
                raised[place].append("")
            except RuntimeError as error:
                raised[place].append(str(error))
    return raised


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
    worker.config = task["config"]
    worker.role = "actor_rollout"
    worker._is_actor = True
    worker._is_ref = False
    worker.enable_routing_replay = False
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

    def __init__(self, config: Any) -> None:
        self.reset = self.set_loss_fn = lambda *_: None

    def get_dispatch_collect(self) -> dict[str, Any]:
        return {"dispatch_dp_rank": {}, "collect_dp_rank": {}}
