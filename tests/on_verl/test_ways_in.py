"""The ways into a verl job: what is changed in its workers, and how to change nothing.

By variables that verl reads when it is imported, as in the job's runtime_env (a whole job over Ray that is
entered so: tests/verl_live). `external_lib` comes later, in a method of the worker. ways_worker.py has both.
"""

from __future__ import annotations

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
WAYS: dict[str, tuple[dict[str, str], bool]] = {
    "modules": ({MODULES: "npu_replay", PLUGINS: "none"}, True),
    "plug-in": ({MODULES: "", PLUGINS: "auto"}, False),
}
"""Variables; is npu_replay in the place of verl's, or waits until a config asks for replay?"""

R3 = {
    "actor_rollout_ref.model.load_tokenizer": False,
    "actor_rollout_ref.model.external_lib": "npu_replay",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 1,
}
FSDP2 = {**R3, FSDP: "R3", "actor_rollout_ref.actor.strategy": "fsdp2"}
EXTERNAL_LIB: dict[str, dict[str, Any]] = {
    **({"legacy": {"legacy": True, "lines": {**R3, OLD: "R3"}}} if HAS_LEGACY else {}),
    "engine": {"legacy": False, "lines": {**R3, NEW: "R3"}},
    "engine, fsdp2": {"legacy": False, "lines": FSDP2, "trainer": "ppo_trainer"},
}
"""A job by its workers."""
BY_ENTRY_POINT: dict[str, dict[str, Any]] = {
    "trainer": {"modes": ["disabled", "R2"]},
    "agent loops": {"with_routes": [False, True]},
}
PLACES = ["megatron.router_replay", "fsdp_config.router_replay", "router_replay"]

_OF_A_WORKER = {"__init__", "set_dispatch_collect", "_build_model_optimizer"}
AT_LOAD = {
    **{
        f"verl.workers.{name}.ActorRolloutRefWorker": _OF_A_WORKER
        for name in ("engine_workers", "megatron_workers", "fsdp_workers")
    },
    "verl.experimental.agent_loop.agent_loop.AgentLoopWorker": {"__init__"},
    "verl.trainer.ppo.ray_trainer.RayPPOTrainer": {"_compute_ref_log_prob"},
}
"""What verl's entry point wraps: what reads a config, and the method that sends a reference its batch."""
KNOWN = {f"{owner}.{name}" for owner, names in AT_LOAD.items() for name in names}


def check_in_place(worker: dict[str, Any], ours: bool) -> None:
    assert worker["replays"]
    assert all(file.endswith(OURS if ours else VERLS) for file in worker["replays"].values()), worker
    assert any("forward_backward_batch" in place for place in worker["changed"]) == ours
    for where in ("RouterReplay.clear_global_indices", CHECKED) if ours else ():
        assert any(where in place for place in worker["changed"])


@pytest.mark.newest
@pytest.mark.parametrize("way", WAYS)
def test_each_way_in_is_there_once_verl_is_imported(way: str, tmp_path: Path) -> None:
    write(tmp_path, "npu-replay", points())
    variables, ours = WAYS[way]
    env = CLEAN | variables
    (worker,) = jobs.start("on_verl.ways_worker:early", env=env, path=[tmp_path])
    assert not worker.problem, worker.problem
    assert worker.answer["imported_with_verl"]
    check_in_place(worker.answer, ours)
    assert ours or set(worker.answer["changed"]) <= KNOWN


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each worker has reported; one process imports verl, and they are its forks."""
    from transformers import Qwen3MoeConfig

    folder = tmp_path_factory.mktemp("model")
    Qwen3MoeConfig(num_hidden_layers=2, architectures=["Qwen3MoeForCausalLM"]).save_pretrained(folder)
    tasks: dict[str, Any] = {
        way: ("changes", {"model": str(folder), **task}, {}) for way, task in EXTERNAL_LIB.items()
    }
    tasks |= {of: ("by_entry_point", task, {}) for of, task in BY_ENTRY_POINT.items()}
    tasks["broken"] = "broken", {"places": PLACES}, {}
    tasks["lenient"] = "broken", {"places": PLACES}, {"NPU_REPLAY_STRICT": "0"}
    env = CLEAN | {PLUGINS: "none"}
    answers: dict[str, Any] = jobs.run("on_verl.ways_worker:forks", {"tasks": tasks}, env=env)
    return answers


@pytest.mark.parametrize("way", EXTERNAL_LIB)
def test_external_lib_comes_late_and_is_there_before_a_step(forks: dict[str, Any], way: str) -> None:
    """R3 without the flag is refused by then."""
    worker = forks[way]
    assert not worker["imported_with_verl"]
    check_in_place(worker, True)
    assert worker["stopped"].startswith("ReplayError: "), worker["stopped"]
    assert "needs the rollout's routes" in worker["stopped"]


@pytest.mark.parametrize("of", BY_ENTRY_POINT)
def test_an_entry_point_wraps_what_reads_the_config_and_the_rest_once_a_config_asks(
    forks: dict[str, Any], of: str
) -> None:
    """No pass, router or config of Megatron has anything of it until then. That nothing else differs, also
    after an uninstall: test_untouched.py."""
    worker = forks[of]
    off, on = (str(asked) for asked in next(iter(BY_ENTRY_POINT[of].values())))
    assert worker["loaded"]
    assert set(worker["loaded"]) <= KNOWN
    assert worker[off] == worker["loaded"]
    assert worker[on] == worker["all"]
    everything = " ".join(worker["all"])
    assert all(name in everything for name in ("TopKRouter", "TransformerConfig", "forward_backward_batch"))


def test_where_npu_replay_can_not_be_imported_a_job_that_asks_is_refused(forks: dict[str, Any]) -> None:
    """And no other job, nor one that goes on without by NPU_REPLAY_STRICT=off."""
    for place in PLACES:
        off, refused = forks["broken"][place]
        assert not off
        assert refused.startswith("RuntimeError: ")
        assert f"actor_rollout_ref.actor.{place}.mode=R3 asks for replay" in refused
        assert "ModuleNotFoundError" in refused, "the cause"
        assert "NPU_REPLAY_AUTOLOAD=off" in refused, "the way out"
        assert forks["lenient"][place] == ["", ""]
