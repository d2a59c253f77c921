"""All features mixed at random, in process: every row is right, and no trainer refuses one.

Wrong rows of a live engine: test_overlap.py; those that a decoder refuses: tests/rollout.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from live.engine import Live, load
from live.families import VOCABULARY
from live.held import CEILING, assert_right, look
from npu_replay import Rollout, Turn, from_vllm

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
