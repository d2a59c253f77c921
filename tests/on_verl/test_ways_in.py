"""The ways into a verl job: what is changed in its workers, and how to change nothing.

With a real Ray (ways_worker.py): variables of the job's runtime_env, or of one worker alone, which verl reads
when it is imported. `external_lib` comes later, in a method of the worker, and needs no Ray.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import jobs
from entry_points_job import points, write
from verl_configs import FSDP, HAS_LEGACY, NEW, OLD

pytestmark = [pytest.mark.megatron, pytest.mark.slow, pytest.mark.timeout(600)]

OURS = "compat/verl/functions.py"
VERLS = "verl/utils/megatron/router_replay_patch.py"
"""Files with the code behind verl's global action."""
CHECKED = "ActorRolloutRefWorker.__init__"
PLUGINS = "VERL_USE_EXTERNAL_PLUGINS"
MODULES = "VERL_USE_EXTERNAL_MODULES"
CLEAN: dict[str, str | None] = {MODULES: None, "NPU_REPLAY_DISABLE": None, "NPU_REPLAY_STRICT": None}
HERE = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(Path(__file__).parent)])
JOB = {PLUGINS: "none", MODULES: "npu_replay", "PYTHONPATH": HERE}
WAYS: dict[str, tuple[dict[str, Any], bool]] = {
    "modules": ({"workers": 2, "env": {MODULES: "npu_replay,broken_shim"}}, True),
    "plug-in": ({"workers": 1, "env": {MODULES: "", PLUGINS: "auto"}}, False),
}
"""A task (ways_worker.py); is npu_replay in the place of verl's, or waits until a config asks for replay?"""

R3 = {
    "actor_rollout_ref.model.load_tokenizer": False,
    "actor_rollout_ref.model.external_lib": "npu_replay",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1,
}
FSDP2 = {**R3, FSDP: "R3", "actor_rollout_ref.actor.strategy": "fsdp2"}
EXTERNAL_LIB: dict[str, tuple[dict[str, Any], bool]] = {
    "legacy": ({"lines": {**R3, OLD: "R3"}}, HAS_LEGACY),
    "engine": ({"lines": {**R3, NEW: "R3"}}, True),
    "engine, fsdp2": ({"lines": FSDP2, "trainer": "ppo_trainer"}, True),
}
"""A job by its workers, and whether this release has them."""


def check_in_place(workers: list[dict[str, Any]], ours: bool) -> None:
    for worker in workers:
        assert worker["replays"]
        assert all(file.endswith(OURS if ours else VERLS) for file in worker["replays"].values()), worker
        assert any("forward_backward_batch" in one for one in worker["changed"]) == ours
        for where in ("RouterReplay.clear_global_indices", CHECKED) if ours else ():
            assert any(where in one for one in worker["changed"])


@pytest.mark.newest
def test_each_way_in_reaches_every_worker_and_a_shim_that_fails_is_in_the_log_of_each(tmp_path: Path) -> None:
    write(tmp_path, "npu-replay", points())
    WAYS["plug-in"][0]["env"]["PYTHONPATH"] = os.pathsep.join([str(tmp_path), HERE])
    task = {"runtime_env": JOB, "jobs": [job for job, _ in WAYS.values()]}
    (driver,) = jobs.start("on_verl.ways_worker:main", task, fresh=True, env=CLEAN, timeout=580)
    assert not driver.problem, driver.problem
    for (job, ours), workers in zip(WAYS.values(), driver.answer["jobs"], strict=True):
        assert len({worker["pid"] for worker in workers}) == job["workers"]
        assert all(worker["imported_with_verl"] for worker in workers)
        check_in_place(workers, ours)
    lines = [line for line in driver.output.splitlines() if "a broken shim failed" in line]
    logged_by = {line.partition("pid=")[2].partition(")")[0] for line in lines}
    assert logged_by == {str(worker["pid"]) for worker in driver.answer["jobs"][0]}
    words = "[npu_replay] a broken shim failed on verl.workers.engine_workers: KeyError"
    assert all(words in line for line in lines)


@pytest.fixture(scope="module")
def late(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each worker with `external_lib` has found; one process imports verl, and they are its forks."""
    from transformers import Qwen3MoeConfig

    folder = tmp_path_factory.mktemp("model")
    Qwen3MoeConfig(num_hidden_layers=2, architectures=["Qwen3MoeForCausalLM"]).save_pretrained(folder)
    tasks = {name: {"external_lib": name, **task} for name, (task, here) in EXTERNAL_LIB.items() if here}
    given = {"jobs": tasks, "model": str(folder)}
    env = CLEAN | {PLUGINS: "none"}
    answer: dict[str, dict[str, Any]] = jobs.run("on_verl.ways_worker:late", given, env=env)
    return answer


@pytest.mark.parametrize("way", [name for name, (_, here) in EXTERNAL_LIB.items() if here])
def test_external_lib_comes_late_and_is_there_before_a_step(
    late: dict[str, dict[str, Any]], way: str
) -> None:
    """R3 without the flag is refused by then."""
    worker = late[way]
    assert not worker["imported_with_verl"]
    check_in_place([worker], True)
    assert worker["stopped"].startswith("ReplayError: "), worker["stopped"]
    assert "needs the rollout's routes" in worker["stopped"]
