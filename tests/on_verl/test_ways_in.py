"""Every way into a verl job, with a real Ray of two workers: what is changed in each, and how to have none.

Three Rays (ways_worker.py), each with jobs of two workers. What a Ray is started with is the raylet's
environment; the runtime_env is the job's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import verl

import jobs
from verl_configs import HAS_LEGACY, NEW, OLD, engine_workers_replay

OURS = "npu_replay.compat.verl.router_replay"
TAKEN_OVER = "verl.utils.megatron.router_replay_patch.RouterReplay"
CHECKED = "ActorRolloutRefWorker.__init__"
NO_PLUGINS = {"VERL_USE_EXTERNAL_PLUGINS": "none"}
BY_NAME = {"VERL_USE_EXTERNAL_MODULES": "npu_replay"}
OFF = {"NPU_REPLAY_DISABLE": "1"}
CLEAN = {"VERL_USE_EXTERNAL_MODULES": None, "NPU_REPLAY_DISABLE": None, "NPU_REPLAY_STRICT": None}

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(600)]

HAS_PLUGINS = "verl.plugins" in (Path(verl.__path__[0]) / "__init__.py").read_text(encoding="utf-8")

Job = dict[str, Any]


class Jobs:
    """What the workers of each job have answered, and all that the driver and they have logged."""

    def __init__(self, names: list[str], driver: jobs.Ended) -> None:
        assert not driver.problem, driver.problem
        self._answers = dict(zip(names, driver.answer, strict=True))
        self.log = driver.output

    def of(self, name: str, when: str = "workers") -> list[Job]:
        workers = self._answers[name][when]
        assert len({worker["pid"] for worker in workers}) == 2
        return workers


@pytest.fixture(scope="module")
def start() -> Callable[..., Jobs]:
    def start(wanted: dict[str, Job], raylet: dict[str, str], runtime_env: dict[str, str]) -> Jobs:
        task = {"runtime_env": runtime_env, "jobs": list(wanted.values())}
        env = {**CLEAN, **raylet}
        (driver,) = jobs.start("on_verl.ways_worker:main", task, fresh=True, env=env, timeout=580)
        return Jobs(list(wanted), driver)

    return start


@pytest.fixture(scope="module")
def by_the_raylet(start: Callable[..., Jobs]) -> Jobs:
    """npu_replay by name in the environment that every node's Ray was started in."""
    jobs = {
        "plain": {"uninstall": True},
        "off": {"env": OFF},
        "broken": {"env": {"VERL_USE_EXTERNAL_MODULES": "npu_replay,broken_shim"}},
    }
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent)])
    return start(jobs, {**NO_PLUGINS, **BY_NAME, "PYTHONPATH": path}, {})


@pytest.fixture(scope="module")
def by_the_job(start: Callable[..., Jobs], tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """Nothing in the raylet's environment, and no plug-ins by the job's runtime_env."""
    lines = {
        "actor_rollout_ref.model.path": tiny_model(tmp_path_factory.mktemp("model")),
        "actor_rollout_ref.model.load_tokenizer": False,
        "actor_rollout_ref.model.external_lib": "npu_replay",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1,
    }
    jobs = {"nothing": {}, "by name": {"env": BY_NAME}}
    if HAS_PLUGINS:
        jobs["plug-in"] = {"env": {"VERL_USE_EXTERNAL_PLUGINS": "auto"}}
    if HAS_LEGACY:
        jobs["legacy"] = {"external_lib": "legacy", "lines": {**lines, OLD: "R3"}}
    if engine_workers_replay():
        jobs["engine"] = {"external_lib": "engine", "lines": {**lines, NEW: "R3"}}
    return start(jobs, {}, NO_PLUGINS)


@pytest.fixture(scope="module")
def off_by_the_raylet(start: Callable[..., Jobs]) -> Jobs:
    """Off in the raylet's environment, and npu_replay by name in the job's runtime_env."""
    return start({"only": {}}, OFF, {**NO_PLUGINS, **BY_NAME})


def tiny_model(folder: Path) -> str:
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(num_hidden_layers=2, architectures=["Qwen3MoeForCausalLM"]).save_pretrained(folder)
    return str(folder)


def assert_in_place(workers: list[Job]) -> None:
    for worker in workers:
        assert set(worker["replays"].values()) == {OURS}, worker
        assert TAKEN_OVER in worker["changed"]
        assert any(CHECKED in where for where in worker["changed"])


def assert_verls_own(workers: list[Job]) -> None:
    for worker in workers:
        assert set(worker["replays"].values()) == {"verl.utils.megatron.router_replay_patch"}, worker
        assert worker["changed"] == []


def test_external_modules_in_the_raylets_environment_reach_every_worker(by_the_raylet: Jobs) -> None:
    workers = by_the_raylet.of("plain")
    assert all(worker["imported_with_verl"] for worker in workers)
    assert_in_place(workers)


def test_uninstall_in_every_worker_leaves_verl_as_it_was(by_the_raylet: Jobs) -> None:
    assert_verls_own(by_the_raylet.of("plain", "after"))


def test_disable_by_runtime_env_leaves_verl_as_it_is(by_the_raylet: Jobs) -> None:
    workers = by_the_raylet.of("off")
    assert all(worker["imported_with_verl"] for worker in workers)
    assert_verls_own(workers)


def test_a_shim_that_fails_is_an_error_in_the_log_of_every_worker(by_the_raylet: Jobs) -> None:
    lines = [line for line in by_the_raylet.log.splitlines() if "a broken shim failed" in line]
    logged_by = {line.partition("pid=")[2].partition(")")[0] for line in lines}
    assert logged_by == {str(worker["pid"]) for worker in by_the_raylet.of("broken")}
    assert all(
        "[npu_replay] a broken shim failed on verl.workers.engine_workers: KeyError" in line for line in lines
    )


def test_without_a_way_in_nothing_is_imported(by_the_job: Jobs) -> None:
    workers = by_the_job.of("nothing")
    assert not any(worker["imported_with_verl"] for worker in workers)
    assert_verls_own(workers)


def test_external_modules_by_runtime_env_reach_every_worker(by_the_job: Jobs) -> None:
    assert_in_place(by_the_job.of("by name"))


@pytest.mark.skipif(not HAS_PLUGINS, reason="entry points are loaded from verl 0.9 on")
def test_the_entry_point_is_there_without_a_line_of_config(by_the_job: Jobs) -> None:
    workers = by_the_job.of("plug-in")
    assert all(worker["imported_with_verl"] for worker in workers)
    assert_in_place(workers)


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param("legacy", marks=pytest.mark.skipif(not HAS_LEGACY, reason="0.7 has them")),
        pytest.param("engine", marks=pytest.mark.skipif(not engine_workers_replay(), reason="from 0.7.1 on")),
    ],
)
def test_external_lib_comes_late_and_is_there_before_a_step(by_the_job: Jobs, workers: str) -> None:
    found = by_the_job.of(workers)
    assert not any(worker["imported_with_verl"] for worker in found)
    assert_in_place(found)
    for worker in found:  # R3 without the rollout's flag
        assert worker["stopped"].startswith("ReplayError: "), worker["stopped"]
        assert "needs the rollout's routes" in worker["stopped"]


def test_disable_in_the_raylets_environment_holds_against_a_runtime_env(off_by_the_raylet: Jobs) -> None:
    workers = off_by_the_raylet.of("only")
    assert all(worker["imported_with_verl"] for worker in workers)
    assert_verls_own(workers)
