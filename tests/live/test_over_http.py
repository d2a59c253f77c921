"""vLLM's own server, asked over HTTP: each path to an answer, and what a loop does between two of them."""

from __future__ import annotations

import json
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai

from json_server import post
from live.engine import Live
from live.families import prompt
from live.held import assert_right
from npu_replay import Rollout, Turn, from_vllm

MESSAGES = [{"role": "user", "content": "w17 w9 w30 w8"}, {"role": "assistant", "content": "w5 w6"}]


def assert_all_right(
    live: Live, answer: bytes, prompt_ids: list[int] | None = None, start: int = 0
) -> list[dict[str, Any]]:
    """Every completion of an answer; returns its choices."""
    body = json.loads(answer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # T10: what came over HTTP can't be written to
        of_each = from_vllm(answer, live.folder, prompt_token_ids=prompt_ids, start=start)
    choices: list[dict[str, Any]] = body["choices"]
    for choice, routes in zip(choices, of_each, strict=True):
        ran = prompt_ids or choice.get("prompt_token_ids") or body["prompt_token_ids"]
        assert_right(live.model, [*ran, *choice["token_ids"]], routes, start)
    return choices


def test_T10_completions(served: Live) -> None:
    for _ in range(2):  # the second time from the prefix cache
        answer = served.engine.ask("/v1/completions", prompt=prompt(1, 200), max_tokens=24, n=3)
        assert len(assert_all_right(served, answer)) == 3


def test_chat_with_a_stop_string(served: Live) -> None:
    asked = {"messages": MESSAGES, "max_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    (free,) = assert_all_right(served, served.engine.ask("/v1/chat/completions", **asked))
    word = free["message"]["content"].split()[9]
    (cut,) = assert_all_right(served, served.engine.ask("/v1/chat/completions", **asked, stop=[f" {word} "]))
    assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", f" {word} ")
    assert len(cut["token_ids"]) < 24


def test_tokens_in_and_out(served: Live) -> None:
    ids = prompt(2, 70)
    for start in (0, 33):
        sampling = {"max_tokens": 12, "routed_experts_prompt_start": start}
        answer = served.engine.ask("/inference/v1/generate", token_ids=ids, sampling_params=sampling)
        assert len(assert_all_right(served, answer, ids, start)) == 1


def test_T37_openais_client_reads_chat_answers_that_carry_routes(served: Live) -> None:
    client = openai.OpenAI(base_url=f"{served.engine.url}/v1", api_key="none", max_retries=0, timeout=60)
    asked = {"return_token_ids": True, "ignore_eos": True}
    answer = client.chat.completions.create(model="m", messages=MESSAGES, max_tokens=12, extra_body=asked)
    assert answer.choices[0].message.content
    (routes,) = from_vllm(answer, served.folder)
    body = answer.model_dump()
    assert_right(served.model, [*body["prompt_token_ids"], *body["choices"][0]["token_ids"]], routes)


def test_T13_T28_an_abort_and_its_resume(served: Live) -> None:
    ids = prompt(9, 50)
    rollout = Rollout(served.folder)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(served.engine.ask, "/v1/completions", prompt=ids, max_tokens=900, ignore_eos=True)
        time.sleep(1.0)
        post(f"{served.engine.url}/pause?mode=abort", {})
        answer = asked.result(60)
    post(f"{served.engine.url}/resume", {})
    (choice,) = json.loads(answer)["choices"]
    assert choice["finish_reason"] == "abort"
    sampled = choice["token_ids"]
    assert 0 < len(sampled) < 900
    (routes,) = from_vllm(answer, served.folder)
    rollout.extend(Turn(prompt=ids, sampled=sampled, routes=routes, aborted=True))
    ids = rollout.tokens.tolist()
    answer = served.engine.ask("/v1/completions", prompt=ids, max_tokens=16, ignore_eos=True)
    (routes,) = from_vllm(answer, served.folder)
    rollout.extend(Turn(prompt=ids, sampled=json.loads(answer)["choices"][0]["token_ids"], routes=routes))
    assert len(rollout) == 50 + len(sampled) + 16
    assert_right(served.model, rollout.tokens, rollout.routes)
