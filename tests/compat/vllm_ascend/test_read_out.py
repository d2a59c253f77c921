"""Both ends of a step, on objects that have a runner's and a capturer's names. The real ones run in
tests/on_vllm_ascend and tests/live.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.vllm_ascend.capture import Capture
from npu_replay.compat.vllm_ascend.placing import Layout
from npu_replay.compat.vllm_ascend.read_out import ReadOut
from npu_replay.compat.vllm_ascend.self_check import SelfCheck
from npu_replay.errors import ReplayError

TOKENS = 6
GROUP = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16))


class Runner:
    """One layer that routes, one of two experts chosen; `slots` by KV cache group."""

    def __init__(self, **more: Any) -> None:
        self.scheduler_config = SimpleNamespace(async_scheduling=False)
        self.kv_cache_config = SimpleNamespace(kv_cache_groups=[GROUP])
        self.kept: list[list[int]] = []
        self.__dict__ |= more

    def execute_model(self, scheduled: Any, dummy_run: bool = False) -> None:
        tokens = scheduled.total_num_scheduled_tokens
        ids = torch.ones(tokens, 1, dtype=torch.int32)
        self.capture.take(0, ids, None, Layout(comm="none", tokens=tokens, entered=tokens))

    def install(self, capturer: Any = None) -> Any:
        """Install it; returns the capturer, by itself that of the releases to 0.20.2."""
        if capturer is None:
            capturer = SimpleNamespace(save_captured_experts=lambda indices: self.kept.append([*indices]))
        self.capture = Capture(
            torch.zeros(32, 1, 1, dtype=torch.int32), SelfCheck({0: "layer 0"}, 2, None, "here"), None
        )
        self.patches = Patches("a test")
        ReadOut(self, capturer, self.capture).install(self.patches)
        return capturer


def step(tokens: int = TOKENS, done: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        num_scheduled_tokens={"one": tokens},
        scheduled_new_reqs=[SimpleNamespace(req_id="one", num_computed_tokens=done)],
        scheduled_cached_reqs=SimpleNamespace(req_ids=[], num_computed_tokens=[]),
    )


def test_slots_that_fill_up_a_graph_are_cut_off() -> None:
    """To 0.20.2: they are -1, which numpy takes for the cache's last slot."""
    runner = Runner()
    capturer = runner.install()
    runner.execute_model(step())
    capturer.save_captured_experts(indices=[*range(32, 32 + TOKENS), -1, -1])
    assert runner.kept == [list(range(32, 32 + TOKENS))]
    runner.execute_model(step(2), dummy_run=True)  # which begins nothing
    assert runner.capture.scheduled == TOKENS


@pytest.mark.parametrize(
    "change",
    [lambda slot: slot + 1, lambda slot: 32, lambda slot: slot - 64],
    ids=["one further", "all the same", "below zero"],
)
def test_slots_of_other_tokens_are_an_error_and_without_strict_give_zeros(
    change: Callable[[int], int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = Runner()
    capturer = runner.install()
    runner.execute_model(step(done=3))
    with pytest.raises(ReplayError, match="the slots of step 1 aren't those of its tokens"):
        capturer.save_captured_experts([change(slot) for slot in range(35, 35 + TOKENS)])
    monkeypatch.setenv("NPU_REPLAY_STRICT", "0")
    runner = Runner()
    capturer = runner.install()
    for done in (3, 9):
        runner.execute_model(step(done=done))
        capturer.save_captured_experts([change(slot) for slot in range(32 + done, 32 + done + TOKENS)])
        assert not runner.capture.buffer.any()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "the slots of step 1 aren't those of its tokens" in caplog.text


def test_drafts_that_were_rejected_a_step_ago_leave_slots_unchecked() -> None:
    """The scheduler counts them still, under asynchronous scheduling."""
    runner = Runner(speculative_config=object(), scheduler_config=SimpleNamespace(async_scheduling=True))
    capturer = runner.install()
    runner.execute_model(step(done=3))
    capturer.save_captured_experts(list(range(32, 32 + TOKENS)))
    assert len(runner.kept) == 1


def test_a_hybrid_models_slots_are_those_of_its_attention() -> None:
    """0.22 to 0.29: the runner keeps those of group 0, which may be a state's."""
    tables = [
        SimpleNamespace(slot_mapping=SimpleNamespace(gpu=torch.arange(first, first + 16)))
        for first in (9, 32)
    ]

    def _build_attention_metadata() -> str:
        runner.routed_experts_slot_mapping_device[:8].copy_(tables[0].slot_mapping.gpu[:8])
        return "made"

    runner: Any = Runner(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[GROUP, GROUP]),
        routed_experts_attn_gid=1,
        routed_experts_slot_mapping_device=torch.zeros(16, dtype=torch.int64),
        input_batch=SimpleNamespace(block_table=tables),
        _build_attention_metadata=_build_attention_metadata,
    )
    capturer = SimpleNamespace(get_device_buffer=lambda: runner.capture.buffer, clear_buffer=lambda: None)
    runner.install(capturer)
    runner.execute_model(step())
    assert runner._build_attention_metadata() == "made"
    assert runner.routed_experts_slot_mapping_device[:TOKENS].tolist() == list(range(32, 32 + TOKENS))
    assert capturer.get_device_buffer()[:TOKENS, 0, 0].tolist() == [1] * TOKENS
    assert not runner.patches.undo()
    assert runner._build_attention_metadata is _build_attention_metadata


def test_what_gives_no_right_slots_is_refused() -> None:
    """To 0.20.2 vLLM keeps the first group's: those of a sliding window are given back meanwhile."""
    with pytest.raises(ReplayError, match="2 groups: SimpleNamespace, SimpleNamespace"):
        Runner(kv_cache_config=SimpleNamespace(kv_cache_groups=[GROUP, GROUP])).install()


def test_drafts_that_vllm_leaves_out_of_a_step_are_not_missed() -> None:
    """From 0.28 on with adaptive verification, fewer tokens run than are scheduled."""
    ran = TOKENS - 2
    runner: Any = Runner()
    runner.execute_model = lambda scheduled: Runner.execute_model(runner, step(ran))
    capturer = SimpleNamespace(attn_gid=0, get_routed_experts=lambda slots, tokens: tokens)
    runner.install(capturer)
    runner.execute_model(step())
    assert capturer.get_routed_experts([torch.arange(32, 64)], ran) == ran
    assert runner.capture.buffer[:ran, 0, 0].tolist() == [1] * ran
