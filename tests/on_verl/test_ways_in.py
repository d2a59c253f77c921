"""Every way into a verl job: what is changed in its workers, and how to change nothing.

With a real Ray (ways_worker.py): variables, which verl reads when it is imported. What a Ray is started with
is the raylet's environment; the runtime_env is the job's, or one worker's own. `external_lib` comes later, in
a method of the worker, and needs no Ray.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import jobs
from verl_configs import FSDP, HAS_LEGACY, NEW, OLD, engine_workers_replay

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(600)]

OURS, VERLS = "compat/verl/functions.py", "verl/utils/megatron/router_replay_patch.py"
"""Files with the code behind verl's global action."""
CHECKED = "ActorRolloutRefWorker.__init__"
NO_PLUGINS, ALL_PLUGINS = ({"VERL_USE_EXTERNAL_PLUGINS": which} for which in ("none", "auto"))
BY_NAME, NONE_BY_NAME = ({"VERL_USE_EXTERNAL_MODULES": which} for which in ("npu_replay", ""))
OFF = {"NPU_REPLAY_DISABLE": "1"}
CLEAN = {"VERL_USE_EXTERNAL_MODULES": None, "NPU_REPLAY_DISABLE": None, "NPU_REPLAY_STRICT": None}
HERE = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent)])
RAYS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "raylet": ({**NO_PLUGINS, **BY_NAME, "PYTHONPATH": HERE}, {}),
    "job": ({}, {**NO_PLUGINS, **BY_NAME}),
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


WAYS = {
    "modules by the raylet": Way("raylet", {"workers": 2, "uninstall": True}, True, True),
    "modules by the raylet, off by the job": Way("raylet", {"env": OFF}, True, False),
    "a broken shim": Way(
        "raylet", {"env": {"VERL_USE_EXTERNAL_MODULES": "npu_replay,broken_shim"}}, True, True
    ),
    "no way": Way("raylet", {"env": NONE_BY_NAME}, False, False),
    "plug-in": Way("raylet", {"env": {**NONE_BY_NAME, **ALL_PLUGINS}}, True, True),
    "modules by the job": Way("job", {}, True, True),
    "modules by the job, off by the raylet": Way("off", {}, True, False),
}

R3 = {
    "actor_rollout_ref.model.load_tokenizer": False,
    "actor_rollout_ref.model.external_lib": "npu_replay",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1,
}
FSDP2 = {**R3, FSDP: "R3", "actor_rollout_ref.actor.strategy": "fsdp2"}
EXTERNAL_LIB: dict[str, tuple[dict[str, Any], bool]] = {
    "legacy": ({"lines": {**R3, OLD: "R3"}}, HAS_LEGACY),
    "engine": ({"lines": {**R3, NEW: "R3"}}, engine_workers_replay()),
    "engine, fsdp2": ({"lines": FSDP2, "trainer": "ppo_trainer"}, engine_workers_replay()),
}
"""A job by its workers, and whether this release has them."""


@dataclass
class Found:
    """What the workers of a job have answered, also after an uninstall(), and all that its Ray has logged."""

    workers: list[dict[str, Any]]
    after: list[dict[str, Any]]
    log: str
    store: dict[str, bool]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Callable[[str], Found]:
    """A Ray runs the jobs of all tests that were selected when the first of them asks."""
    answers: dict[str, Found] = {}
    items = [item for item in request.session.items if item.path == request.path]
    selected = {item.callspec.params["way"] for item in items if hasattr(item, "callspec")}

    def of(name: str) -> Found:
        if name not in answers:
            raylet, runtime_env = RAYS[WAYS[name].ray]
            names = [one for one in WAYS if one in {name, *selected} and WAYS[one].ray == WAYS[name].ray]
            tasks = [WAYS[one].task for one in names]
            (driver,) = jobs.start(
                "on_verl.ways_worker:main",
                {"runtime_env": runtime_env, "jobs": tasks},
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


def check_in_place(workers: list[dict[str, Any]], ours: bool) -> None:
    for worker in workers:
        assert worker["replays"]
        assert all(file.endswith(OURS if ours else VERLS) for file in worker["replays"].values()), worker
        assert bool(worker["changed"]) == ours
        assert not ours or any("RouterReplay.clear_global_indices" in where for where in worker["changed"])
        assert not ours or any(CHECKED in where for where in worker["changed"])


@pytest.mark.newest
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(name, marks=[] if way.ray == "raylet" else [pytest.mark.long])
        for name, way in WAYS.items()
    ],
)
def test_each_way_in_reaches_every_worker_of_its_job_and_off_is_off(
    found: Callable[[str], Found], way: str
) -> None:
    wanted, workers = WAYS[way], found(way).workers
    assert all(worker["imported_with_verl"] == wanted.imported for worker in workers)
    check_in_place(workers, wanted.ours)


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each worker with `external_lib` has found; one process imports verl, and they are its forks."""
    from transformers import Qwen3MoeConfig

    folder = tmp_path_factory.mktemp("model")
    Qwen3MoeConfig(num_hidden_layers=2, architectures=["Qwen3MoeForCausalLM"]).save_pretrained(folder)
    tasks = {name: {"external_lib": name, **task} for name, (task, here) in EXTERNAL_LIB.items() if here}
    given = {"jobs": tasks, "model": str(folder)}
    found: dict[str, dict[str, Any]] = jobs.run("on_verl.ways_worker:late", given, env=CLEAN | NO_PLUGINS)
    return found


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(name, marks=pytest.mark.skipif(not here, reason="not in this release"))
        for name, (_, here) in EXTERNAL_LIB.items()
    ],
)
def test_external_lib_comes_late_and_is_there_before_a_step(
    late: dict[str, dict[str, Any]], way: str
) -> None:
    """R3 without the flag is refused by then."""
    worker = late[way]
    assert not worker["imported_with_verl"]
    check_in_place([worker], True)
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
