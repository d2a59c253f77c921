"""All features mixed at random, in process: no right row is refused, and no wrong one taken."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from live.engine import Live, load
from live.held import assert_right
from live.mix import ALL, Sequence, Tally, ask, some_prompts
from live.test_in_process import counter, has_cache
from npu_replay import Rollout, Turn, from_vllm

SEQUENCES = 700 if ALL else 80
"""Of each family."""


def completions(output: Any, start: int) -> list[Sequence]:
    def one(number: int) -> Sequence:
        def answer(rows: Any) -> Any:
            changed = copy.copy(output)
            completion = copy.copy(output.outputs[number])
            completion.routed_experts = rows
            changed.outputs = [completion]
            return changed

        completion = output.outputs[number]
        sampled = list(completion.token_ids)
        return Sequence(list(output.prompt_token_ids), sampled, start, completion.routed_experts, answer)

    return [one(number) for number in range(len(output.outputs))]


class Mix:
    """A live engine under requests that come, are aborted and resumed, and go on with a tool's answer."""

    def __init__(self, live: Any) -> None:
        self.engine = live.engine.llm_engine
        self.rng = np.random.default_rng(16)
        self.tally = Tally(live.model, live.folder, self.rng)
        self.shared = some_prompts(self.rng)
        self.waiting: list[tuple[list[int], dict[str, Any], Rollout | None]] = []

    def batch(self) -> None:
        """Some requests at once, until all have ended; what goes on from them is in the next batch."""
        wanted = [*self.waiting, *((*ask(self.rng, self.shared), None) for _ in range(12))]
        asked = {str(number): one for number, one in enumerate(wanted)}
        self.waiting = []
        for name, (ids, sampling, _) in asked.items():
            # Else each output of a step has one of the request's completions.
            kind = RequestOutputKind.FINAL_ONLY if "n" in sampling else RequestOutputKind.CUMULATIVE
            asked_for = SamplingParams(**sampling, output_kind=kind)
            self.engine.add_request(name, {"prompt_token_ids": ids}, asked_for)
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
        self.tally.features["aborted"] += 1
        self.waiting.append(([*ids, *seen[name].outputs[0].token_ids], sampling, None))

    def _ended(self, output: Any, ids: list[int], sampling: dict[str, Any], rollout: Rollout | None) -> None:
        start = sampling.get("routed_experts_prompt_start", 0)
        found = completions(output, start)
        self.tally.hold(found)
        self.tally.features["from the cache"] += bool(output.num_cached_tokens)
        self.tally.features["stopped"] += any(one.finish_reason == "stop" for one in output.outputs)
        self.tally.features["from a start"] += bool(start)
        if start or len(found) > 1:
            return
        (one,) = found
        (routes,) = from_vllm(output, self.tally.folder)
        turn = Turn(prompt=ids, sampled=one.sampled, routes=routes)
        if rollout is not None:
            rollout.extend(turn)
            assert_right(self.tally.model, rollout.tokens, rollout.routes)
            self.tally.features["two turns"] += 1
        elif self.rng.random() < 0.3:
            rollout = Rollout(self.tally.folder)
            rollout.extend(turn)
            rollout.append(self.rng.integers(3, 500, 5))
            self.waiting.append((rollout.tokens.tolist(), {"max_tokens": 20}, rollout))


@pytest.mark.timeout(3600)
def test_T23_T29_a_random_mix_in_process(live: Live, newer: Any) -> None:
    """Tokens from the prefix cache, and requests that were preempted: rows of tokens that ran twice are those
    of the tokens, whoever had their blocks in between."""
    mix = Mix(live)
    while mix.tally.sequences < SEQUENCES // 2:
        mix.batch()
    load(live.engine, newer[1])
    assert live.engine.reset_prefix_cache()
    mix.waiting = []
    mix.tally.change(newer[0])
    wanted = {"aborted", "stopped", "two turns", "preempted", "from a start"}
    wanted |= {"from the cache"} if has_cache(live) else set()
    missing = wanted
    while mix.tally.sequences < SEQUENCES or (missing and mix.tally.sequences < 3 * SEQUENCES):
        mix.batch()
        mix.tally.features["preempted"] = counter(live, "vllm:num_preemptions")
        missing = wanted - {name for name, count in mix.tally.features.items() if count}
    mix.tally.check(SEQUENCES)
    assert not missing, "so many sequences, and these never came about"
