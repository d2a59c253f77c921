"""verl's workers by each way into a job: what npu_replay has changed in each.

`early` imports verl with the variables that it reads then. `forks` imports it without npu_replay, for the
functions below it, which each run in a fork.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import product
from typing import Any
from unittest.mock import MagicMock

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


def early(task: dict[str, Any]) -> dict[str, Any]:
    """A worker in whose environment verl is told of npu_replay."""
    import_module("verl")
    return changes(task)


def forks(task: dict[str, Any]) -> dict[str, Any]:
    """What each of `tasks` returns: the name of a function, what it is called with, and variables."""
    from verl_configs import composed

    for name in (*MODULES, *ALSO):
        _imported(name)
    composed("ppo_megatron_trainer")
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        answers = pool.starmap(_run, task["tasks"].values(), chunksize=1)
    return dict(zip(task["tasks"], answers, strict=True))


def _run(function: str, task: dict[str, Any], variables: dict[str, str]) -> Any:
    os.environ.update(variables)
    return globals()[function](task)


def changes(task: dict[str, Any]) -> dict[str, Any]:
    """In a worker: import what a training worker imports, and report.

    Where the task has the folder of a `model`, its init_model runs with actor_rollout_ref.model.external_lib:

        legacy     in 0.7's "legacy" workers, or others
        lines      lines of that job's config
        trainer    whose config that is, by its name; if not said Megatron's
    """
    before = "npu_replay" in sys.modules
    modules = [module for name in MODULES if (module := _imported(name))]
    stopped = _init_model(task) if "model" in task else ""
    replays = {
        module.__name__: module.RouterReplay.set_global_router_replay_action.__code__.co_filename
        for module in modules
        if hasattr(module, "RouterReplay")
    }
    return {
        "imported_with_verl": before,
        "replays": replays,
        "changed": [patch.where for patch in sys.modules["npu_replay"].report().patches],
        "stopped": stopped,
    }


def by_entry_point(task: dict[str, Any]) -> dict[str, Any]:
    """What verl's entry point changes, then what does once a worker has read its config.

    It is each of the task's "modes", or for a worker of agent loops each of "with_routes". Last, what an
    install() of everything changes.
    """
    import npu_replay_autoload

    npu_replay_autoload.load("verl")
    import npu_replay
    from npu_replay.compat.verl import config as verl_config
    from verl_configs import FLAG, NEW, job

    def changed() -> list[str]:
        return sorted({patch.where for patch in npu_replay.report().patches})

    answer = {"loaded": changed()}
    for mode in task.get("modes", ()):
        worker = object.__new__(sys.modules["verl.workers.engine_workers"].ActorRolloutRefWorker)
        worker.config = job({NEW: mode}).actor_rollout_ref
        worker.role = "actor"
        verl_config._check_worker(worker, False)
        answer[mode] = changed()
    for asked in task.get("with_routes", ()):
        with contextlib.suppress(TypeError, AttributeError, ValueError):  # it lacks its other arguments
            sys.modules[ALSO[0]].AgentLoopWorker(job({FLAG: asked}))
        answer[str(asked)] = changed()
    npu_replay.install()
    return answer | {"all": changed()}


def broken(task: dict[str, Any]) -> dict[str, list[str]]:
    """What verl's workers raise where npu_replay can't be imported, by each of the task's "places" of a mode:
    without a mode and with R3."""
    sys.modules["npu_replay"] = None  # type: ignore[assignment]  its import fails
    import_module("npu_replay_autoload.verl")
    del sys.modules["verl.workers.engine_workers"]  # an entry point comes before it
    workers = import_module("verl.workers.engine_workers")
    omegaconf = import_module("omegaconf").OmegaConf
    raised: dict[str, list[str]] = {place: [] for place in task["places"]}
    for place, mode in product(raised, ("disabled", "R3")):
        actor = {"strategy": "megatron", "megatron": {"router_replay": {"mode": "disabled"}}}
        config = omegaconf.create({"actor": actor, "rollout": {}})
        omegaconf.update(config, f"actor.{place}.mode", mode, force_add=True)
        raised[place].append(_raised(partial(workers.ActorRolloutRefWorker, config=config, role="actor")))
    return raised


def _raised(run: Callable[[], Any]) -> str:
    """What a call raises; empty if nothing."""
    try:
        run()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _imported(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        return None


def _init_model(task: dict[str, Any]) -> str:
    """verl's own init_model, until the first thing that needs a model or a device. What did it raise?"""
    from verl_configs import job

    workers = import_module(f"verl.workers.{'megatron' if task['legacy'] else 'engine'}_workers")
    worker = object.__new__(workers.ActorRolloutRefWorker)
    lines = {"actor_rollout_ref.model.path": task["model"], **task["lines"]}
    worker.config = job(lines, trainer=task.get("trainer", "ppo_megatron_trainer")).actor_rollout_ref
    worker.role = "actor_rollout"
    worker._is_actor = True
    worker._is_ref = False
    worker.enable_routing_replay = False
    worker.distillation_enabled = False
    worker._omega_profiler_config = {}
    training = MagicMock()  # where verl's would make an engine: what init_model asks of it next
    training.return_value.get_dispatch_collect.return_value = {"dispatch_dp_rank": {}, "collect_dp_rank": {}}
    workers.TrainingWorker = worker.actor_worker_cls = training
    return _raised(worker.init_model)
