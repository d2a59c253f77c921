"""npu_replay installed, and no mode set: what an entry point changes until a config asks for replay.
That nothing else differs, also after an uninstall: test_untouched.py."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest

import jobs

pytestmark = pytest.mark.megatron

# Each case imports verl anew. Of the older releases one of each kind runs with every change.
OF_OLDER = [pytest.mark.long] if version("verl") < "0.9" else []


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
PLACES = ["megatron.router_replay", "fsdp_config.router_replay", "router_replay"]


@pytest.mark.parametrize(
    "task",
    [
        pytest.param({"modes": ["disabled", "R2"]}, id="trainer"),
        pytest.param({"with_routes": [False, True]}, id="agent loops", marks=OF_OLDER),
    ],
)
def test_an_entry_point_wraps_what_reads_the_config_and_the_rest_once_a_config_asks(
    task: dict[str, Any],
) -> None:
    """No pass, router or config of Megatron has anything of it until then."""
    found = jobs.run("on_verl.ways_worker:by_entry_point", task)
    (off, on) = (str(asked) for asked in next(iter(task.values())))
    known = {f"{owner}.{name}" for owner, names in AT_LOAD.items() for name in names}
    assert found["loaded"]
    assert set(found["loaded"]) <= known
    assert found[off] == found["loaded"]
    assert found[on] == found["all"]
    everything = " ".join(found["all"])
    assert all(name in everything for name in ("TopKRouter", "TransformerConfig", "forward_backward_batch"))


def test_where_npu_replay_can_not_be_imported_a_job_that_asks_is_refused() -> None:
    """And no other job, nor one that goes on without by NPU_REPLAY_STRICT=off."""
    raised = jobs.run("on_verl.ways_worker:broken", {"places": PLACES})
    lenient = jobs.run("on_verl.ways_worker:broken", {"places": PLACES}, env={"NPU_REPLAY_STRICT": "0"})
    for place in PLACES:
        off, refused = raised[place]
        assert not off
        assert f"actor_rollout_ref.actor.{place}.mode=R3 asks for replay" in refused
        assert "ModuleNotFoundError" in refused, "the cause"
        assert "NPU_REPLAY_AUTOLOAD=off" in refused, "the way out"
        assert lenient[place] == ["", ""]
