"""Weights that change between two turns, and a turn that is aborted, in this process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from live.engine import load
from live.families import VOCABULARY, truth
from live.held import Trainer, assert_right
from npu_replay import Rollout, Turn, from_vllm
from npu_replay.errors import InvalidRoutes, MicroBatchError

FIRST = 90
SAMPLED = 40
TOOL = 10


def turn(live: Any, ids: list[int], **said: Any) -> Turn:
    asked = SamplingParams(max_tokens=SAMPLED, ignore_eos=True)
    (output,) = live.engine.generate([{"prompt_token_ids": ids}], asked, use_tqdm=False)
    (routes,) = from_vllm(output, live.folder, **said)
    return Turn(prompt=ids, sampled=output.outputs[0].token_ids, routes=routes)


def two_turns(live: Any, newer: Any, reset: bool, **keep: Any) -> Rollout:
    ids = np.random.default_rng(7).integers(3, VOCABULARY, FIRST + TOOL).tolist()
    rollout = Rollout(live.folder)
    rollout.extend(turn(live, ids[:FIRST], weight_version=1))
    rollout.append(ids[FIRST:])
    load(live.engine, *newer)
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


def test_T14_or_all_rows_are_of_the_new_weights(live: Any, newer: Any) -> None:
    rollout = two_turns(live, newer, reset=True, keep="latest")
    assert rollout.weight_versions == [2] * (len(rollout) - 1) + [None]
    assert_right(newer[0], rollout.tokens, rollout.routes)
    trainer = Trainer(newer[0])
    trainer.step(rollout.tokens, rollout.routes)
    assert trainer.steps == 1


def test_rows_of_a_cache_that_wasnt_reset_cant_be_seen_at_the_door_but_by_the_trainer(
    live: Any, newer: Any
) -> None:
    """Blocks that were cached with the old weights bring old rows under the new version."""
    rollout = two_turns(live, newer, reset=False, keep="latest")
    assert set(rollout.weight_versions[:-1]) == {2}
    ids = np.sort(rollout.routes.ids.numpy(), axis=2)
    cached = (FIRST + SAMPLED - 1) // 32 * 32
    of_old = (ids[:cached] == truth(live.model, rollout.tokens).ids[:cached]).mean() > 0.9  # but for ties
    trainer = Trainer(newer[0])
    if live.engine.llm_engine.vllm_config.cache_config.enable_prefix_caching:
        assert of_old
        with pytest.raises(MicroBatchError, match="far from what the routers would choose"):
            trainer.step(rollout.tokens, rollout.routes)
    else:
        assert not of_old
        assert_right(newer[0], rollout.tokens, rollout.routes)


def test_weights_that_the_engine_loaded_in_part_cant_be_seen_at_the_door_but_by_the_trainer(
    live: Any, newer: Any
) -> None:
    """On a CPU vLLM 0.30's own reload_weights leaves the experts as they were, with a warning.

    The routers are the new ones, so some rows are as near as a very coarse rollout's. A trainer that knows
    that both sides are float32 asks for more.
    """
    load(live.engine, *newer, experts=False)
    assert live.engine.reset_prefix_cache()
    half = turn(live, list(range(5, 95)), weight_version=2)
    trainer = Trainer(newer[0], min_overlap=0.98)
    with pytest.raises(MicroBatchError, match="far from what the routers would choose"):
        trainer.step([*half.prompt, *half.sampled], half.routes)
    load(live.engine, *newer)
    assert live.engine.reset_prefix_cache()
    whole = turn(live, list(range(5, 95)), weight_version=2)
    trainer.step([*whole.prompt, *whole.sampled], whole.routes)
    assert trainer.steps == 1


def test_T13_T28_a_turn_that_was_aborted_is_resumed(live: Any) -> None:
    """vLLM hands nothing out with an abort in process: what came before is all there is."""
    engine = live.engine.llm_engine
    ids = np.random.default_rng(8).integers(3, VOCABULARY, 40).tolist()
    engine.add_request("aborted", {"prompt_token_ids": ids}, SamplingParams(max_tokens=200, ignore_eos=True))
    seen = [output for _ in range(30) for output in engine.step()][-1]
    engine.abort_request(["aborted"])
    assert not engine.has_unfinished_requests()
    sampled = list(seen.outputs[0].token_ids)
    assert 20 < len(sampled) < 31
    with pytest.raises(InvalidRoutes, match="isn't finished"):
        from_vllm(seen, live.folder)
    again = turn(live, ids + sampled)
    for keep, known in (("latest", True), ("first", False)):
        rollout = Rollout(live.folder)
        rollout.extend(Turn(prompt=ids, sampled=sampled, aborted=True))
        rollout.extend(again, keep=keep)
        assert rollout.tokens[: 40 + len(sampled)].tolist() == ids + sampled
        # Nobody knows from which rows the aborted turn was sampled: "first" leaves them to the router.
        lost = set() if known else set(range(39, 39 + len(sampled)))
        assert set(np.flatnonzero(~rollout.routes.recorded)) == lost | {len(rollout) - 1}
    assert again.routes is not None
    assert_right(live.model, rollout.tokens, again.routes)
