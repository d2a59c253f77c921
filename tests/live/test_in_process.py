"""An engine in this process: all features mixed at random, weights that change between two turns, and the
capture that npu_replay brings to vllm-ascend.

Wrong rows of a live engine: test_overlap.py; those that a decoder refuses: tests/rollout.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from live.engine import Live, load
from live.families import VOCABULARY, prompt, truth
from live.held import CEILING, assert_right, look
from npu_replay import MicroBatchError, Rollout, Turn, from_vllm
from npu_replay.compat.patching.patches import Patches
from npu_replay.compat.vllm_ascend.capture import Capture
from npu_replay.compat.vllm_ascend.capture_points import choice, layers
from npu_replay.compat.vllm_ascend.placing import Layout
from npu_replay.compat.vllm_ascend.read_out import ReadOut
from npu_replay.compat.vllm_ascend.self_check import STEPS, SelfCheck

SEQUENCES = 700 if os.environ.get("NPU_REPLAY_LIVE_ALL") else 40
"""Of each family."""


class Mix:
    """A live engine under requests that come, are aborted and resumed, and go on with a tool's answer."""

    def __init__(self, live: Any) -> None:
        self.engine = live.engine.llm_engine
        self.model = live.model
        self.folder = live.folder
        self.rng = np.random.default_rng(16)
        # Beginnings that requests share, so that a prefix cache has work; one is longer than a chunk.
        self.shared = [self.rng.integers(3, VOCABULARY, length).tolist() for length in (0, 0, 32, 70, 140)]
        self.waiting: list[tuple[list[int], dict[str, Any], Rollout | None]] = []
        self.sequences = 0
        self.token_layers = 0
        self.ties = 0
        self.features: Counter[str] = Counter()

    def ask(self) -> tuple[list[int], dict[str, Any], None]:
        """A prompt, which may begin as others do, and what to sample with."""
        rng = self.rng
        own = rng.integers(3, VOCABULARY, rng.integers(1, 40)).tolist()
        ids = [*self.shared[rng.integers(len(self.shared))], *own]
        sampling: dict[str, Any] = {
            "max_tokens": int(rng.integers(1, 60)),
            "temperature": float(rng.choice([0, 0.7, 1])),
        }
        features: dict[str, Callable[[], Any]] = {
            "n": lambda: int(rng.choice([2, 3, 8])),
            "stop": lambda: [f"{rng.integers(10)} "],
            "stop_token_ids": lambda: rng.integers(3, VOCABULARY, 30).tolist(),
            "routed_experts_prompt_start": lambda: int(rng.integers(len(ids))),
            "ignore_eos": lambda: True,
            "logprobs": lambda: 2,
            "repetition_penalty": lambda: 1.2,
        }
        sampling |= {name: value() for name, value in features.items() if rng.random() < 0.25}
        if sampling.get("n", 1) > 1:
            sampling["temperature"] = 1.0
        return ids, sampling, None

    def batch(self) -> None:
        """Some requests at once, until all have ended; what goes on from them is in the next batch."""
        requests = [*self.waiting, *(self.ask() for _ in range(12))]
        asked = {str(number): request for number, request in enumerate(requests)}
        self.waiting = []
        for name, (ids, sampling, _) in asked.items():
            # Else each output of a step has one of the request's completions.
            kind = RequestOutputKind.FINAL_ONLY if "n" in sampling else RequestOutputKind.CUMULATIVE
            how = SamplingParams(**sampling, output_kind=kind)
            self.engine.add_request(name, {"prompt_token_ids": ids}, how)
        seen: dict[str, Any] = {}
        while self.engine.has_unfinished_requests():
            seen |= {output.request_id: output for output in self.engine.step()}
            if self.rng.random() < 0.03:
                self._abort(asked, seen)
        for name in [name for name in asked if name in seen]:  # in order: a run can be repeated
            self._ended(seen[name], *asked[name])

    def _abort(self, asked: dict[str, Any], seen: dict[str, Any]) -> None:
        running = [name for name in asked if name in seen and not seen[name].finished]
        if not running:
            return
        name = running[self.rng.integers(len(running))]
        ids, sampling, _ = asked.pop(name)
        self.engine.abort_request([name])
        self.features["aborted"] += 1
        self.waiting.append(([*ids, *seen[name].outputs[0].token_ids], sampling, None))

    def _ended(self, output: Any, ids: list[int], sampling: dict[str, Any], rollout: Rollout | None) -> None:
        start = sampling.get("routed_experts_prompt_start", 0)
        read = from_vllm(output, self.folder, start=start)
        for completion, routes in zip(output.outputs, read, strict=True):
            tokens = [*output.prompt_token_ids, *completion.token_ids]
            ties = assert_right(self.model, tokens, routes, start)
            token_layers = int(routes.recorded.sum()) * len(routes.layers)
            assert look(self.model, tokens, routes) <= CEILING + ties / token_layers
            self.ties += ties
            self.sequences += 1
            self.token_layers += token_layers
        self.features["from the cache"] += bool(output.num_cached_tokens)
        self.features["stopped"] += any(completion.finish_reason == "stop" for completion in output.outputs)
        self.features["from a start"] += bool(start)
        if start or len(read) > 1:
            return
        turn = Turn(prompt=ids, sampled=list(output.outputs[0].token_ids), routes=read[0])
        if rollout is not None:
            rollout.extend(turn)
            assert_right(self.model, rollout.tokens, rollout.routes)
            self.features["two turns"] += 1
        elif self.rng.random() < 0.3:
            rollout = Rollout(self.folder)
            rollout.extend(turn)
            rollout.append(self.rng.integers(3, 500, 5))
            self.waiting.append((rollout.tokens.tolist(), {"max_tokens": 20}, rollout))


@pytest.mark.timeout(3600)
def test_T23_T29_a_random_mix_in_process(live: Live, newer: Any) -> None:
    """Tokens from the prefix cache, and requests that were preempted: rows of tokens that ran twice are those
    of the tokens, whoever had their blocks in between."""
    mix = Mix(live)
    while mix.sequences < SEQUENCES // 2:
        mix.batch()
    load(live.engine, newer[1])
    assert live.engine.reset_prefix_cache()
    mix.waiting = []
    mix.model = newer[0]
    wanted = {"aborted", "stopped", "two turns", "preempted", "from a start"}
    if live.engine.llm_engine.vllm_config.cache_config.enable_prefix_caching:
        wanted.add("from the cache")
    else:
        assert "Deepseek" in type(live.model).__name__  # without AMX vLLM turns it off for its attention
    missing = wanted
    while mix.sequences < SEQUENCES or (missing and mix.sequences < 4 * SEQUENCES):
        mix.batch()
        mix.features["preempted"] = sum(
            metric.value for metric in live.engine.get_metrics() if metric.name == "vllm:num_preemptions"
        )
        missing = wanted - {name for name, count in mix.features.items() if count}
    # DeepSeek's experts, chosen by groups, lie close: 10 of 46,014 were seen on one processor.
    assert mix.ties <= mix.token_layers / 2_000
    assert not missing, "so many sequences, and these never came about"


# ---- weights that change between two turns


FIRST = 90
SAMPLED = 40
TOOL = 10


def turn(live: Any, ids: list[int], **options: Any) -> Turn:
    sampling = SamplingParams(max_tokens=SAMPLED, ignore_eos=True)
    (output,) = live.engine.generate([{"prompt_token_ids": ids}], sampling, use_tqdm=False)
    (routes,) = from_vllm(output, live.folder, **options)
    return Turn(prompt=ids, sampled=output.outputs[0].token_ids, routes=routes)


def two_turns(live: Any, newer: Any, reset: bool, **keep: Any) -> Rollout:
    ids = prompt(7, FIRST + TOOL)
    rollout = Rollout(live.folder)
    rollout.extend(turn(live, ids[:FIRST], weight_version=1))
    rollout.append(ids[FIRST:])
    load(live.engine, newer[1])
    assert not reset or live.engine.reset_prefix_cache()
    rollout.extend(turn(live, rollout.tokens.tolist(), weight_version=2), **keep)
    return rollout


def test_T14_rows_keep_the_weights_that_tokens_were_sampled_from(live: Any, newer: Any) -> None:
    rollout = two_turns(live, newer, reset=True)
    old = FIRST + SAMPLED - 1  # the last that was sampled runs with the next turn
    assert rollout.weight_versions == [1] * old + [2] * (1 + TOOL + SAMPLED - 1) + [None]
    ids = np.sort(rollout.routes.ids.numpy(), axis=2)
    for model, rows in ((live.model, slice(0, old)), (newer[0], slice(old, len(rollout) - 1))):
        true = truth(model, rollout.tokens)
        differ = np.argwhere((ids[rows] != true.ids[rows]).any(axis=2))
        assert not len(differ) or true.tie[rows][tuple(differ[0])]  # a tie, and what is behind it
    assert rollout.routes.weight_version is None


def test_rows_of_a_cache_that_wasnt_reset_cant_be_seen_at_the_door_but_by_the_trainer(
    live: Any, newer: Any
) -> None:
    """Blocks that were cached with the old weights bring old rows under the new version."""
    if not live.engine.llm_engine.vllm_config.cache_config.enable_prefix_caching:
        pytest.skip("without AMX vLLM turns its prefix cache off for DeepSeek's attention")
    rollout = two_turns(live, newer, reset=False, keep="latest")
    assert set(rollout.weight_versions[:-1]) == {2}
    ids = np.sort(rollout.routes.ids.numpy(), axis=2)
    cached = (FIRST + SAMPLED - 1) // 32 * 32
    assert (ids[:cached] == truth(live.model, rollout.tokens).ids[:cached]).mean() > 0.9  # but for ties
    with pytest.raises(MicroBatchError, match="far from what the routers would choose"):
        look(newer[0], rollout.tokens, rollout.routes)


# ---- vllm-ascend's capture


def attach(patches: Patches, llm: Any) -> None:
    """As the plug-in's `attach`, in the live engine's own runner on the plain platform: read-out, scheduler
    and output are real.

    A CPU's layers tell vLLM's capturer themselves and split no tokens, so what chooses is reached here as the
    plain platform has it; vllm-ascend's layers are in tests/on_vllm_ascend.
    """

    def in_worker(worker: Any) -> None:
        runner = worker.model_runner
        capturer = runner.routed_experts_capturer
        routed = layers(runner.model)
        experts = next(iter(routed.values())).moe_config.num_logical_experts
        check = SelfCheck({number: f"layer {number}" for number in routed}, experts, None, "a live vLLM")
        capture = Capture(capturer.device_buffer, check, None)

        def enter(
            original: Any, hidden: torch.Tensor, logits: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Any:
            capture.enter(logits)
            return original(hidden, logits, *args, **kwargs)

        def take(layer: int, ids: torch.Tensor) -> None:
            router = routed[layer].router
            rows = ids.shape[0]
            chosen = choice(lambda name: getattr(router, name, None))
            capture.take(layer, ids, chosen, Layout(comm="none", tokens=rows, entered=rows))

        for module in routed.values():
            patches.wrap(module.router, "_compute_routing", enter, "the logits of a choice")
        patches.set(capturer, "capture", take, "places rows")
        ReadOut(runner, capturer, capture).install(patches)

    llm.collective_rpc(in_worker)


@pytest.fixture
def patches() -> Iterator[Patches]:
    made = Patches("a capture in a live engine")
    yield made
    made.undo()


def test_rows_through_vllms_own_runner_are_right(
    live: Any, patches: Patches, caplog: pytest.LogCaptureFixture
) -> None:
    """Prompts in chunks, a shared prefix and several completions; steps of more and of fewer tokens."""
    attach(patches, live.engine)
    shared = prompt(1, 70)
    sampling = SamplingParams(n=2, max_tokens=24, temperature=1.0, ignore_eos=True)
    with caplog.at_level(logging.WARNING, "npu_replay"):
        for number in range(3):
            prompts = [[*shared, *prompt(number, 40)], prompt(9 + number, 90 - 30 * number)]
            requests = [{"prompt_token_ids": ids} for ids in prompts]
            for output in live.engine.generate(requests, sampling, use_tqdm=False):
                for completion, routes in zip(output.outputs, from_vllm(output, live.folder), strict=True):
                    assert_right(live.model, [*output.prompt_token_ids, *completion.token_ids], routes)
    (line,) = [line for line in caplog.messages if "are captured on" in line]
    assert f"Checked over {STEPS} steps" in line
    assert "of their own" not in line
