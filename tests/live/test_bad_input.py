"""What an engine does wrong is an error that names it before an optimizer steps; and the run goes on."""

from __future__ import annotations

import copy
import http.client
import json
import time
import urllib.error
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from json_server import post, serving
from live.engine import Live, Server
from live.families import FAMILIES, VOCABULARY
from live.held import Trainer, assert_right
from live.mix import decoded, encoded
from npu_replay import Rollout, RoutedExperts, Turn, from_vllm
from npu_replay.errors import InvalidRoutes, MicroBatchError, ReplayError

ASKED = np.random.default_rng(1).integers(3, VOCABULARY, 80).tolist()
OTHER = np.random.default_rng(2).integers(3, VOCABULARY, 80).tolist()
SAMPLING = {"max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(server_of: Any) -> Live:
    found: Live = server_of("Qwen3Moe")
    return found


def sample(live: Live, url: str, config: Any = None) -> tuple[list[int], RoutedExperts]:
    """One sample by a client that asks this server and knows what it asked for."""
    answer = Server.ask_at(url, "/v1/completions", prompt=ASKED, **SAMPLING)
    (routes,) = from_vllm(answer, config or live.folder, prompt_token_ids=ASKED)
    return [*ASKED, *json.loads(answer)["choices"][0]["token_ids"]], routes


def refused(live: Live, url: str, error: type[ReplayError], words: str, config: Any = None) -> None:
    """A loop of this server's samples ends with that error, its weights untouched; with a good server it
    goes on."""
    trainer = Trainer(copy.deepcopy(live.model))
    with pytest.raises(error, match=words):
        trainer.step(*sample(live, url, config))
    assert trainer.steps == 0
    for ours, before in zip(trainer.model.parameters(), live.model.parameters(), strict=True):
        assert torch.equal(ours, before)
    trainer.step(*sample(live, live.engine.url))
    assert trainer.steps == 1


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "Qwen3Moe"])
def test_the_config_of_another_family(served: Live, saved: Any, family: str) -> None:
    words = "columns|top-k|out of range|dense layer"
    refused(served, served.engine.url, InvalidRoutes, words, saved(family)[1])


@pytest.mark.parametrize(
    ("experts", "error", "words"),
    [
        pytest.param(16, InvalidRoutes, "out of range", id="fewer"),
        pytest.param(64, ReplayError, "experts", id="more-cant-be-seen-at-the-door-but-by-the-trainer"),
    ],
)
def test_a_config_with_other_experts(
    served: Live, experts: int, error: type[ReplayError], words: str
) -> None:
    changes = {"num_experts": experts, "architectures": ["Qwen3MoeForCausalLM"]}
    refused(served, served.engine.url, error, words, {**served.model.config.to_dict(), **changes})


def of_another_request(live: Live) -> dict[str, Any]:
    answer = live.engine.ask("/v1/completions", prompt=OTHER, **SAMPLING)
    found: dict[str, Any] = json.loads(answer)["choices"][0]
    return found


def without(choice: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in choice.items() if key != name}


ROWS = "routed_experts"
Fault = Callable[[Live, dict[str, Any]], dict[str, Any]]
only_rows: Fault = lambda live, choice: choice | {ROWS: of_another_request(live)[ROWS]}  # noqa: E731
the_whole_choice: Fault = lambda live, choice: of_another_request(live)  # noqa: E731
no_rows: Fault = lambda _, choice: without(choice, ROWS)  # noqa: E731
half_of_the_text: Fault = lambda _, one: one | {ROWS: one[ROWS][: len(one[ROWS]) // 2]}  # noqa: E731
zeros: Fault = lambda _, one: one | {ROWS: encoded(np.zeros_like(decoded(one[ROWS])))}  # noqa: E731
FAR = "far from what the routers would choose"


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        pytest.param(only_rows, MicroBatchError, FAR, id="rows-cant-be-seen-at-the-door-but-by-the-trainer"),
        pytest.param(the_whole_choice, InvalidRoutes, "aren't those that the engine ran", id="whole-choice"),
        pytest.param(no_rows, InvalidRoutes, "no routes", id="T37-T38-no-rows"),
        pytest.param(zeros, InvalidRoutes, "all 99 rows are zeros", id="T1-zeros"),
        pytest.param(half_of_the_text, InvalidRoutes, "base64|cut short", id="half-of-the-text"),
    ],
)
def test_a_proxy_that_changes_answers(
    served: Live, fault: Fault, error: type[ReplayError], words: str
) -> None:
    def proxied(path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(post(served.engine.url + path, body))
        return answer | {"choices": [fault(served, answer["choices"][0])]}

    with serving(proxied) as url:
        refused(served, url, error, words)


def test_what_a_server_refuses_is_quoted(served: Live) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        served.engine.ask("/v1/completions", prompt=[*ASKED] * 20, **SAMPLING)
    with pytest.raises(InvalidRoutes, match=r"the server refused.*1024"):
        from_vllm(caught.value.read(), served.folder)


@pytest.mark.long  # with weights of another version in one process: test_new_weights.py
def test_restarted_with_other_weights(served: Live, saved: Any) -> None:
    trainer = Trainer(copy.deepcopy(served.model))
    newer, folder = saved("Qwen3Moe", seed=1)
    with Server(folder) as restarted:
        with pytest.raises(MicroBatchError, match=FAR):
            trainer.step(*sample(served, restarted.url))
        assert trainer.steps == 0
        resumed = Trainer(newer)  # from the checkpoint that the engine was started with
        found = sample(served, restarted.url)
        resumed.step(*found)
        assert resumed.steps == 1
        assert_right(newer, *found)


def test_killed_in_the_middle(served: Live) -> None:
    """Comes last: it kills the server."""
    rollout = Rollout(served.folder)
    tokens, routes = sample(served, served.engine.url)
    rollout.extend(Turn(prompt=ASKED, sampled=tokens[len(ASKED) :], routes=routes))

    def ask() -> None:
        with pytest.raises((OSError, http.client.HTTPException)):
            served.engine.ask("/v1/completions", prompt=tokens, max_tokens=900, ignore_eos=True)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        time.sleep(0.5)
        assert not asked.done()
        served.engine.kill()
        asked.result(60)
    # what was sampled is lost, what was known isn't
    rollout.extend(Turn(prompt=tokens, sampled=[], aborted=True))
    assert rollout.tokens.tolist() == tokens
