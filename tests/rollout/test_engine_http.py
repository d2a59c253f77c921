"""Routes over HTTP: a client asks a server in each engine's language, and what comes back is decoded."""

from __future__ import annotations

import json
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from engine_server import EngineServer, chat_ids, events, post
from npu_replay import Rollout, RoutedExperts, RoutedModel, Turn, fingerprint
from npu_replay.compat.sglang import from_sglang, request_arguments
from npu_replay.compat.vllm.decode import from_vllm
from npu_replay.errors import InvalidRoutes
from npu_replay.rollout.release_rules import release

MODEL = RoutedModel(layers=(1, 2, 3, 4), num_layers=5, num_experts=128, topk=6)
MESSAGES = [{"role": "user", "content": "Which experts?"}]
PROMPT, TOKENS = list(range(40, 60)), 12

SGLANG = ("0.5.8", "0.5.9", "0.5.11", "0.5.12", "0.5.13", "0.5.19", "0.5.23")
VLLM = ("0.21.0", "0.22.0", "0.28.0", "0.30.0", "0.33.0")


def assert_true(
    routes: RoutedExperts, server: EngineServer, tokens: list[int], start: int = 0, end: int | None = None
) -> None:
    end = len(tokens) - 1 if end is None else end
    assert routes.layers == MODEL.layers
    assert routes.fingerprint == fingerprint(tokens)
    assert routes.recorded.tolist() == [start <= row < end for row in range(len(tokens))]
    np.testing.assert_array_equal(routes.ids[start:end].numpy(), server.truth(tokens)[start:end])


def ask_sglang(server: EngineServer, prompt: list[int], tokens: int = TOKENS, **extra: Any) -> bytes:
    body = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": tokens},
        **request_arguments(server.version),
        **extra,
    }
    return post(f"{server.url}/generate", body)


# SGLang


@pytest.mark.choice
@pytest.mark.parametrize("version", [version for version in SGLANG if release(version) >= (0, 5, 9)])
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_openai_endpoint_of_sglang(version: str, path: str) -> None:
    chat = path.startswith("chat")
    asked = {"messages": MESSAGES} if chat else {"prompt": PROMPT}
    prompt = chat_ids(MESSAGES) if chat else PROMPT
    with EngineServer("sglang", version, MODEL) as server:
        body = post(f"{server.url}/v1/{path}", {**asked, "max_tokens": TOKENS, **request_arguments(version)})
        output = server.brain.sample(prompt, TOKENS)
        routes = from_sglang(body, MODEL, prompt_token_ids=prompt, output_ids=output, version=version)
        assert_true(routes, server, prompt + output)


@pytest.mark.parametrize("version", SGLANG)
def test_several_samples_and_prompts_of_sglang(version: str) -> None:
    prompts = [PROMPT, PROMPT[:7]]
    with EngineServer("sglang", version, MODEL) as server:
        body = ask_sglang(server, prompts, sampling_params={"max_new_tokens": TOKENS, "n": 3})
        with pytest.raises(InvalidRoutes, match="a list of 6: give them one by one"):
            from_sglang(body, MODEL)
        for number, answer in enumerate(json.loads(body)):
            prompt = prompts[number // 3]
            routes = from_sglang(answer, MODEL, prompt_token_ids=prompt, version=version)
            assert_true(routes, server, prompt + server.brain.sample(prompt, TOKENS, number % 3))


@pytest.mark.parametrize("version", SGLANG)
def test_T30_a_conversation_with_sglang(version: str) -> None:
    """Two turns and a tool's answer between them: each asks for the rows that it adds, and together they are
    those of one pass over the whole sequence."""
    rollout = Rollout(MODEL)
    with EngineServer("sglang", version, MODEL) as server:
        rollout.append(PROMPT)
        for tool in ([7, 8, 9], []):
            prompt = rollout.tokens.tolist()
            start = max(0, int(rollout.routes.recorded.sum()))
            body = ask_sglang(server, prompt, **request_arguments(version, start_len=start))
            output = json.loads(body)["output_ids"]
            routes = from_sglang(body, MODEL, prompt_token_ids=prompt, start_len=start, version=version)
            rollout.extend(Turn(prompt=prompt, sampled=output, routes=routes))
            rollout.append(tool)
        assert_true(rollout.routes, server, rollout.tokens.tolist())
        assert rollout.routes.weight_version == "step-1"


@pytest.mark.parametrize("version", SGLANG)
def test_an_abort_and_its_resume_with_sglang(version: str) -> None:
    rollout = Rollout(MODEL)
    with EngineServer("sglang", version, MODEL) as server:
        for abort_after in (5, None):
            server.abort_after = abort_after
            prompt = rollout.tokens.tolist() or PROMPT
            body = ask_sglang(server, prompt, TOKENS)
            routes = from_sglang(body, MODEL, prompt_token_ids=prompt, version=version)
            sampled = json.loads(body)["output_ids"]
            rollout.extend(
                Turn(prompt=prompt, sampled=sampled, routes=routes, aborted=abort_after is not None)
            )
        assert len(rollout) == len(PROMPT) + 5 + TOKENS
        assert_true(rollout.routes, server, rollout.tokens.tolist())


def test_a_stream_of_sglang_has_its_routes_in_the_last_event() -> None:
    with EngineServer("sglang", "0.5.23", MODEL) as server:
        stream = ask_sglang(server, PROMPT, stream=True)
        with pytest.raises(InvalidRoutes, match=r"isn't JSON.*a stream"):
            from_sglang(stream, MODEL, prompt_token_ids=PROMPT)
        first, last = events(stream)
        assert_true(
            from_sglang(last, MODEL, prompt_token_ids=PROMPT),
            server,
            PROMPT + server.brain.sample(PROMPT, TOKENS),
        )
        with pytest.raises(InvalidRoutes, match="no routes in the answer"):
            from_sglang(first, MODEL, prompt_token_ids=PROMPT)


# vLLM


def ask_vllm(server: EngineServer, endpoint: str, **extra: Any) -> bytes:
    if endpoint == "/inference/v1/generate":
        sampling = {"max_tokens": TOKENS, **extra}
        return post(f"{server.url}{endpoint}", {"token_ids": PROMPT, "sampling_params": sampling})
    asked = {"messages": MESSAGES} if "chat" in endpoint else {"prompt": PROMPT}
    return post(f"{server.url}{endpoint}", {**asked, "max_tokens": TOKENS, "return_token_ids": True, **extra})


ENDPOINTS = ("/v1/completions", "/v1/chat/completions", "/inference/v1/generate")


@pytest.mark.choice
@pytest.mark.parametrize("version", VLLM)
@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("n", [1, 3])
def test_vllm(version: str, endpoint: str, n: int) -> None:
    prompt = chat_ids(MESSAGES) if "chat" in endpoint else PROMPT
    with EngineServer("vllm", version, MODEL) as server:
        body = ask_vllm(server, endpoint, n=n)
        for answer in (body, body.decode(), json.loads(body)):
            found = from_vllm(answer, MODEL, prompt_token_ids=prompt, version=version)
            assert len(found) == n
            for choice, routes in enumerate(found):
                assert_true(routes, server, prompt + server.brain.sample(prompt, TOKENS, choice))


# Both


@pytest.mark.parametrize(("engine", "version"), [("sglang", "0.5.23"), ("vllm", "0.33.0")])
def test_many_requests_at_once_keep_their_own_routes(engine: Any, version: str) -> None:
    with EngineServer(engine, version, MODEL) as server:

        def one(number: int) -> None:
            prompt = [number, *PROMPT]
            tokens = prompt + server.brain.sample(prompt, TOKENS)
            if engine == "sglang":
                routes = from_sglang(ask_sglang(server, prompt), MODEL, prompt_token_ids=prompt)
            else:
                asked = {"token_ids": prompt, "sampling_params": {"max_tokens": TOKENS}}
                body = post(f"{server.url}/inference/v1/generate", asked)
                (routes,) = from_vllm(body, MODEL, prompt_token_ids=prompt)
            assert_true(routes, server, tokens)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(32)))


@pytest.mark.parametrize("page", ["<html>502 Bad Gateway</html>", "", "upstream connect error"])
@pytest.mark.parametrize(("engine", "version"), [("sglang", "0.5.23"), ("vllm", "0.33.0")])
def test_an_error_page_of_something_between(engine: Any, version: str, page: str) -> None:
    with EngineServer(engine, version, MODEL) as server:
        server.broken = page
        path = next(iter(server.paths))
        with pytest.raises(urllib.error.HTTPError, match="500") as caught:
            post(f"{server.url}{path}", {})
        body = caught.value.read()
    with pytest.raises(InvalidRoutes, match="isn't JSON"):
        if engine == "sglang":
            from_sglang(body, MODEL, prompt_token_ids=PROMPT, output_ids=[1])
        else:
            from_vllm(body, MODEL, prompt_token_ids=PROMPT)


def take_out(answer: dict[str, Any]) -> dict[str, Any]:
    """What a gateway takes out of a chat answer before it passes it on: routes, wherever they lie."""
    taken = {key: answer.pop(key) for key in ("sglext", "prompt_routed_experts") if key in answer}
    taken["choices"] = [
        {key: choice.pop(key) for key in ("routed_experts",) if key in choice} | {"index": choice["index"]}
        for choice in answer["choices"]
    ]
    return taken


@pytest.mark.parametrize(
    ("engine", "version"), [("sglang", "0.5.9"), ("sglang", "0.5.23"), ("vllm", "0.21.0"), ("vllm", "0.33.0")]
)
def test_T37_a_chat_answer_goes_on_without_its_routes(engine: Any, version: str) -> None:
    """prime-rl #2813: a field that a reader of chat answers doesn't know breaks it. Routes are decoded from
    what was taken out, and what goes on is the answer of an engine that captures nothing."""
    prompt = chat_ids(MESSAGES)
    asked = {"messages": MESSAGES, "max_tokens": TOKENS, "return_routed_experts": True}
    with EngineServer(engine, version, MODEL) as server:
        answer = json.loads(post(f"{server.url}/v1/chat/completions", asked))
        output = server.brain.sample(prompt, TOKENS)
        taken = take_out(answer)
        if engine == "sglang":
            taken.pop("choices")
            routes = from_sglang(taken, MODEL, prompt_token_ids=prompt, output_ids=output, version=version)
        else:
            (routes,) = from_vllm(
                taken, MODEL, prompt_token_ids=prompt, output_token_ids=[output], version=version
            )
        assert_true(routes, server, prompt + output)
    assert "routed_experts" not in json.dumps(answer)
    with EngineServer(engine, version, MODEL, capturing=False) as server:
        plain = json.loads(post(f"{server.url}/v1/chat/completions", asked))
        take_out(plain)
        assert answer == plain
