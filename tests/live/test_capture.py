"""The capture that npu_replay brings to vllm-ascend, in the live engine's own runner: its read-out, scheduler
and output are real. A CPU's layers tell vLLM's capturer themselves and split no tokens, so what chooses is
reached here as the plain platform has it; vllm-ascend's layers are in tests/on_vllm_ascend.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from vllm import SamplingParams

from live.families import prompt
from live.held import assert_right
from npu_replay import from_vllm
from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.vllm_ascend.capture import Capture
from npu_replay.compat.vllm_ascend.capture_points import choice, layers
from npu_replay.compat.vllm_ascend.placing import Layout
from npu_replay.compat.vllm_ascend.read_out import ReadOut
from npu_replay.compat.vllm_ascend.self_check import STEPS, SelfCheck


def attach(patches: Patches, llm: Any) -> None:
    """As the plug-in's `attach`, on the plain platform."""

    def in_worker(worker: Any) -> None:
        runner = worker.model_runner
        capturer = runner.routed_experts_capturer
        found = layers(runner.model)
        experts = next(iter(found.values())).moe_config.num_logical_experts
        check = SelfCheck({number: f"layer {number}" for number in found}, experts, None, "a live vLLM")
        capture = Capture(capturer.device_buffer, check, None)

        def enter(
            original: Any, hidden: torch.Tensor, logits: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            capture.enter(logits)
            return original(hidden, logits, *args, **kwargs)

        def take(layer: int, ids: torch.Tensor) -> None:
            router = found[layer].router
            rows = ids.shape[0]
            chosen = choice(lambda name: getattr(router, name, None))
            capture.take(layer, ids, chosen, Layout(comm="none", tokens=rows, entered=rows))

        for module in found.values():
            patches.wrap(module.router, "_compute_routing", enter, "the logits of a choice")
        patches.set(capturer, "capture", take, "places rows")
        ReadOut(runner, capturer, capture).install(patches)

    llm.collective_rpc(in_worker)


@pytest.fixture
def patches() -> Iterator[Patches]:
    made = Patches("a capture in a live engine")
    yield made
    assert not made.undo()


def test_rows_through_vllms_own_runner_are_right(
    live: Any, patches: Patches, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts in chunks, a shared prefix and several completions; steps of more and of fewer tokens."""
    attach(patches, live.engine)
    shared = prompt(1, 70)
    asked = SamplingParams(n=2, max_tokens=24, temperature=1.0, ignore_eos=True)
    with caplog.at_level(logging.WARNING, "npu_replay"):
        for number in range(3):
            prompts = [[*shared, *prompt(number, 40)], prompt(9 + number, 90 - 30 * number)]
            requests = [{"prompt_token_ids": ids} for ids in prompts]
            for output in live.engine.generate(requests, asked, use_tqdm=False):
                for completion, routes in zip(output.outputs, from_vllm(output, live.folder), strict=True):
                    assert_right(live.model, [*output.prompt_token_ids, *completion.token_ids], routes)
    (line,) = [line for line in caplog.messages if "are captured on" in line]
    assert f"Checked over {STEPS} steps" in line
    assert "of their own" not in line
