"""Weights that change between two turns, in this process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from live.engine import load
from live.families import prompt, truth
from live.held import look
from npu_replay import Rollout, Turn, from_vllm
from npu_replay.errors import MicroBatchError

FIRST = 90
SAMPLED = 40
TOOL = 10


def turn(live: Any, ids: list[int], **said: Any) -> Turn:
    asked = SamplingParams(max_tokens=SAMPLED, ignore_eos=True)
    (output,) = live.engine.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)
    (routes,) = from_vllm(output, live.folder, **said)
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
