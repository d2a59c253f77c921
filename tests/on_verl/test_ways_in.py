"""Every way into a verl job, with a real Ray: what is changed in its workers, and how to change nothing.

Three Rays (ways_worker.py), with a job for each way. What a Ray is started with is the raylet's environment;
the runtime_env is the job's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import verl

import jobs
from verl_configs import FSDP, HAS_LEGACY, NEW, OLD, engine_workers_replay

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(600)]

OURS, VERLS = "compat/verl/functions.py", "verl/utils/megatron/router_replay_patch.py"
"""Files with the code behind verl's global action."""
CHECKED = "ActorRolloutRefWorker.__init__"
NO_PLUGINS = {"VERL_USE_EXTERNAL_PLUGINS": "none"}
BY_NAME = {"VERL_USE_EXTERNAL_MODULES": "npu_replay"}
OFF = {"NPU_REPLAY_DISABLE": "1"}
CLEAN = {"VERL_USE_EXTERNAL_MODULES": None, "NPU_REPLAY_DISABLE": None, "NPU_REPLAY_STRICT": None}
HERE = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent)])
RAYS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "raylet": ({**NO_PLUGINS, **BY_NAME, "PYTHONPATH": HERE}, {}),
    "job": ({}, NO_PLUGINS),
    "off": (OFF, {**NO_PLUGINS, **BY_NAME}),
}
"""The raylet's environment, and the runtime_env."""


@dataclass(frozen=True)
class Way:
    """In which Ray, with what (ways_worker.py); is npu_replay imported with verl, and in its place?"""

    ray: str
    task: dict[str, Any]
    imported: bool
    ours: bool


R3 = {
    "actor_rollout_ref.model.load_tokenizer": False,
    "actor_rollout_ref.model.external_lib": "npu_replay",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1,
}
WAYS = {
    "modules by the raylet": Way("raylet", {"workers": 2, "uninstall": True}, True, True),
    "modules by the raylet, off by the job": Way("raylet", {"env": OFF}, True, False),
    "a broken shim": Way(
        "raylet", {"env": {"VERL_USE_EXTERNAL_MODULES": "npu_replay,broken_shim"}}, True, True
    ),
    "no way": Way("job", {}, False, False),
    "modules by the job": Way("job", {"env": BY_NAME}, True, True),
    "plug-in": Way("job", {"env": {"VERL_USE_EXTERNAL_PLUGINS": "auto"}}, True, True),
    "external_lib, legacy": Way("job", {"external_lib": "legacy", "lines": {**R3, OLD: "R3"}}, False, True),
    "external_lib, engine": Way("job", {"external_lib": "engine", "lines": {**R3, NEW: "R3"}}, False, True),
    "external_lib, fsdp2": Way(
        "job",
        {
            "external_lib": "engine",
            "trainer": "ppo_trainer",
            "lines": {**R3, FSDP: "R3", "actor_rollout_ref.actor.strategy": "fsdp2"},
        },
        False,
        True,
    ),
    "modules by the job, off by the raylet": Way("off", {}, True, False),
}
HERE_ARE = {
    "plug-in": "verl.plugins" in (Path(verl.__path__[0]) / "__init__.py").read_text(encoding="utf-8"),
    "external_lib, legacy": HAS_LEGACY,
    "external_lib, engine": engine_workers_replay(),
    "external_lib, fsdp2": engine_workers_replay(),
}
"""Ways that not every release has. The others are Ray's and verl's import, the same in all."""


@dataclass
class Found:
    """What the workers of a job have answered, also after an uninstall(), and all that its Ray has logged."""

    workers: list[dict[str, Any]]
    after: list[dict[str, Any]]
    log: str
    store: dict[str, bool]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    """A Ray runs the jobs of all tests that were selected when the first of them asks."""
    answers: dict[str, Found] = {}
    items = [item for item in request.session.items if item.path == request.path]
    selected = {item.callspec.params["way"] for item in items if hasattr(item, "callspec")}

    def of(name: str) -> Found:
        if name not in answers:
            raylet, runtime_env = RAYS[WAYS[name].ray]
            wanted = {name, *selected} & {one for one in WAYS if HERE_ARE.get(one, True)}
            names = [one for one in WAYS if one in wanted and WAYS[one].ray == WAYS[name].ray]
            tasks = [WAYS[one].task for one in names]
            model = tiny_model(tmp_path_factory.mktemp("model"))
            (driver,) = jobs.start(
                "on_verl.ways_worker:main",
                {"runtime_env": runtime_env, "jobs": tasks, "model": model},
                fresh=True,
                env={**CLEAN, **raylet},
                timeout=580,
            )
            assert not driver.problem, driver.problem
            for one, (workers, after) in zip(names, driver.answer["jobs"], strict=True):
                assert len({worker["pid"] for worker in workers}) == WAYS[one].task.get("workers", 1)
                answers[one] = Found(workers, after, driver.output, driver.answer["store"])
        return answers[name]

    return of


def tiny_model(folder: Path) -> str:
    from transformers import Qwen3MoeConfig

    Qwen3MoeConfig(num_hidden_layers=2, architectures=["Qwen3MoeForCausalLM"]).save_pretrained(folder)
    return str(folder)


def check_in_place(workers: list[dict[str, Any]], ours: bool) -> None:
    for worker in workers:
        assert worker["replays"]
        assert all(file.endswith(OURS if ours else VERLS) for file in worker["replays"].values()), worker
        assert bool(worker["changed"]) == ours
        assert not ours or any("RouterReplay.clear_global_indices" in where for where in worker["changed"])
        assert not ours or any(CHECKED in where for where in worker["changed"])


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            name,
            marks=[
                pytest.mark.skipif(not HERE_ARE.get(name, True), reason="not in this release"),
                *([] if name.startswith("external_lib") else [pytest.mark.newest]),
            ],
        )
        for name in WAYS
    ],
)
def test_each_way_in_reaches_every_worker_of_its_job_and_off_is_off(
    found: Callable[[str], Found], way: str
) -> None:
    wanted, workers = WAYS[way], found(way).workers
    assert all(worker["imported_with_verl"] == wanted.imported for worker in workers)
    check_in_place(workers, wanted.ours)
    if way.startswith("external_lib"):  # it comes late, and is there before a step: R3 without the flag
        for worker in workers:
            assert worker["stopped"].startswith("ReplayError: "), worker["stopped"]
            assert "needs the rollout's routes" in worker["stopped"]


@pytest.mark.newest
def test_uninstall_in_every_worker_leaves_verl_as_it_was(found: Callable[[str], Found]) -> None:
    check_in_place(found("modules by the raylet").after, False)


@pytest.mark.newest
def test_a_shim_that_fails_is_an_error_in_the_log_of_every_worker(found: Callable[[str], Found]) -> None:
    broken = found("a broken shim")
    lines = [line for line in broken.log.splitlines() if "a broken shim failed" in line]
    logged_by = {line.partition("pid=")[2].partition(")")[0] for line in lines}
    assert logged_by == {str(worker["pid"]) for worker in broken.workers}
    said = "[npu_replay] a broken shim failed on verl.workers.engine_workers: KeyError"
    assert all(said in line for line in lines)


@pytest.mark.newest
def test_workers_read_routes_where_they_lie_in_rays_store(found: Callable[[str], Found]) -> None:
    """On their way from a rollout worker to a trainer's. No copy: two reads are the same memory."""
    assert found("modules by the raylet").store == {"equal": True, "shared": True, "taken": True}
