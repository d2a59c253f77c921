"""npu_replay installed, and no mode set: what an entry point changes until a config asks for replay.
And engines that go on after an uninstall. That nothing else differs: test_untouched.py."""

from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest

import jobs
import npu_replay
from npu_replay.compat.patching import patches
from npu_replay.compat.verl import engine_pass
from npu_replay.compat.verl.engine_adapter import EngineAdapter
from verl_configs import engine_workers_replay

pytestmark = pytest.mark.megatron

# Each case imports verl anew. Of the older releases one of each kind runs with every change.
OF_OLDER = [pytest.mark.long] if version("verl") < "0.9" else []


class Engine:
    """Of verl's engine what the wrapper looks at; its schedule is over at once."""

    def __init__(self, **config: Any) -> None:
        self.passes = 0
        self.seen: list[bool] = []
        self.module: list[Any] = []
        self.engine_config = SimpleNamespace(**config)

    def forward_backward_batch(self, data: Any, forward_only: bool = False) -> Any:
        self.passes += 1
        self.seen.append(engine_pass.serves())
        return {"metrics": {}}


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


@pytest.mark.skipif(not engine_workers_replay(), reason="0.7.0's don't replay")
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


@pytest.mark.skipif(not engine_workers_replay(), reason="0.7.0's don't replay")
@pytest.mark.parametrize(
    "place",
    [
        "megatron.router_replay",
        *(pytest.param(place, marks=OF_OLDER) for place in ("fsdp_config.router_replay", "router_replay")),
    ],
)
def test_where_npu_replay_can_not_be_imported_a_job_that_asks_is_refused(place: str) -> None:
    """And no other job, nor one that goes on without by NPU_REPLAY_STRICT=off."""
    task = {"modes": ["disabled", "R3"], "key": f"actor.{place}.mode"}
    raised = jobs.run("on_verl.ways_worker:broken", task)
    assert not raised["disabled"]
    assert f"actor_rollout_ref.actor.{place}.mode=R3 asks for replay" in raised["R3"]
    assert "ModuleNotFoundError" in raised["R3"], "the cause"
    assert "NPU_REPLAY_AUTOLOAD=off" in raised["R3"], "the way out"
    lenient = jobs.run("on_verl.ways_worker:broken", task, env={"NPU_REPLAY_STRICT": "0"})
    assert not lenient["R3"]


def test_an_engine_goes_on_as_verls_own_after_uninstall_and_replays_after_install() -> None:
    """Whoever holds its method, too."""
    original = Engine.forward_backward_batch

    class Replaying(Engine):
        forward_backward_batch = patches.switched(original, engine_pass.wrapped(original, EngineAdapter))

    engine = Replaying(router_replay=SimpleNamespace(mode="R2"))
    held = engine.forward_backward_batch
    for off in (False, True, False):
        (npu_replay.uninstall if off else npu_replay.install)()
        before = engine_pass.serves()
        engine.seen = []
        held(None, forward_only=True)
        assert engine.seen == [not off], "in a pass of npu_replay's"
        assert engine_pass.serves() == before
    assert engine.passes == 3
