"""A server on loopback that answers as vLLM's and SGLang's do, release by release.

What stands in is the model: `Brain` samples tokens and chooses experts by a rule, so that a sequence has the
same tokens and routes whoever asks, in one call or in several. Ports, sockets, JSON and the forms of the
answers are real.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import numpy as np

import sglang_outputs
import vllm_outputs
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.release_rules import release
from npu_replay.routes.checks import Array

Engine = Literal["vllm", "sglang"]

_PRIME = (1 << 61) - 1
_ROLES = {"system": 1, "user": 2, "assistant": 3, "tool": 4}


class Brain:
    """Tokens and routes that depend on all tokens before, and on nothing else."""

    def __init__(self, model: RoutedModel) -> None:
        self.model = model

    def sample(self, prompt: Sequence[int], tokens: int, choice: int = 0) -> list[int]:
        """What follows on the prompt; `choice` tells several completions apart."""
        seen = list(prompt)
        for number in range(tokens):
            state = _state(seen)
            seen.append(100 + (state + (choice if number == 0 else 0)) % 50_000)
        return seen[len(prompt) :]

    def rows(self, tokens: Sequence[int]) -> Array:
        """The experts of each token, [tokens, MoE layers, topk] int64."""
        shape = (len(self.model.layers), self.model.num_experts)
        found, state = [], 1
        for token in tokens:
            state = _next(state, token)
            scores = np.random.default_rng(state).random(shape)
            found.append(scores.argsort(axis=1)[:, : self.model.topk])
        return np.array(found, np.int64).reshape(-1, len(self.model.layers), self.model.topk)


def _state(tokens: Sequence[int]) -> int:
    state = 1
    for token in tokens:
        state = _next(state, token)
    return state


def _next(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) % _PRIME


def chat_ids(messages: Sequence[dict[str, str]]) -> list[int]:
    """A chat template: a token for the role, then the text byte by byte; the assistant's turn is opened."""
    ids: list[int] = []
    for message in messages:
        ids += [_ROLES[message["role"]], *(10 + byte for byte in message["content"].encode())]
    return [*ids, _ROLES["assistant"]]


class BadRequest(Exception):
    """The engine would answer 400."""


class EngineServer:
    """One server; `with EngineServer("sglang", "0.5.23", model) as server: post(server.url + ...)`.

    Args:
        capturing: was it started with enable_return_routed_experts?

    Attributes:
        abort_after: end each request as aborted after so many tokens, as a weight update does.
        broken: answer each request with this page and status 500.
    """

    def __init__(self, engine: Engine, version: str, model: RoutedModel, capturing: bool = True) -> None:
        self.version = version
        self.brain = Brain(model)
        self.capturing = capturing
        self.abort_after: int | None = None
        self.broken: str | None = None
        self.paths: dict[str, Callable[[dict[str, Any]], Any]] = {
            "sglang": {
                "/generate": self._sglang_generate,
                "/v1/completions": self._sglang_completions,
                "/v1/chat/completions": self._sglang_chat,
            },
            "vllm": {
                "/v1/completions": self._vllm_completions,
                "/v1/chat/completions": self._vllm_chat,
                "/inference/v1/generate": self._vllm_generate,
            },
        }[engine]

    def __enter__(self) -> EngineServer:
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def truth(self, tokens: Sequence[int]) -> Array:
        """What the routes of a sequence have to be, [tokens, MoE layers, topk]."""
        return self.brain.rows(tokens)

    # SGLang

    def _sglang(
        self, prompt: list[int], most: int, body: dict[str, Any], choice: int = 0
    ) -> sglang_outputs.Request:
        start = body.get("routed_experts_start_len", 0)
        if release(self.version) >= (0, 5, 12) and not 0 <= start <= len(prompt):
            raise BadRequest(f"recv_req.routed_experts_start_len={start} is higher than the number of tokens")
        aborted = self.abort_after is not None and self.abort_after < most
        output = self.brain.sample(prompt, self.abort_after if aborted else most, choice)
        model, ran = self.brain.model, self.brain.rows([*prompt, *output])[:-1]
        rows = np.zeros((len(ran), model.num_layers, model.topk), np.int32)
        rows[:, list(model.layers)] = ran
        return sglang_outputs.Request(
            self.version,
            prompt,
            output,
            rows,
            asked_from=start,
            finish="abort" if aborted else "length",
            captured=self.capturing and bool(body.get("return_routed_experts")),
            weights=[("step-1", 0)],
        )

    def _sglang_generate(self, body: dict[str, Any]) -> Any:
        batch = body["input_ids"]
        prompts = batch if batch and isinstance(batch[0], list) else [batch]
        sampling = body["sampling_params"]
        answers = [
            self._sglang(prompt, sampling["max_new_tokens"], body, choice).generate()
            for prompt in prompts
            for choice in range(sampling.get("n", 1))
        ]
        if body.get("stream"):
            return _streamed(answers[0])
        return answers if len(answers) > 1 or prompts is batch else answers[0]

    def _sglang_completions(self, body: dict[str, Any]) -> Any:
        return self._sglang_openai(body["prompt"], "text_completion", body)

    def _sglang_chat(self, body: dict[str, Any]) -> Any:
        return self._sglang_openai(chat_ids(body["messages"]), "chat.completion", body)

    def _sglang_openai(self, prompt: list[int], kind: str, body: dict[str, Any]) -> Any:
        request = self._sglang(prompt, body["max_tokens"], body)
        answer = request.openai(kind, body.get("n", 1), token_ids=body.get("return_token_ids", False))
        if release(self.version) < (0, 5, 9):
            answer.pop("sglext", None)
        return answer

    # vLLM

    def _vllm(self, prompt: list[int], body: dict[str, Any], sampling: dict[str, Any], endpoint: Any) -> Any:
        start = body.get("routed_experts_prompt_start", sampling.get("routed_experts_prompt_start", 0))
        if start > len(prompt):
            raise BadRequest("routed_experts_prompt_start is beyond the prompt")
        completions = []
        for choice in range(sampling.get("n", 1)):
            aborted = self.abort_after is not None and self.abort_after < sampling["max_tokens"]
            output = self.brain.sample(
                prompt, self.abort_after if aborted else sampling["max_tokens"], choice
            )
            completions.append(
                vllm_outputs.Sampled(
                    prompt,
                    output,
                    self.brain.rows([*prompt, *output]),
                    finish_reason="abort" if aborted else "length",
                )
            )
        answer = vllm_outputs.answer(
            self.version,
            self.brain.model,
            *completions,
            endpoint=endpoint,
            start=start,
            with_ids=bool(body.get("return_token_ids")),
        )
        if not self.capturing:
            answer.pop("prompt_routed_experts", None)
            for choice in answer["choices"]:
                choice["routed_experts"] = None
        return answer

    def _vllm_completions(self, body: dict[str, Any]) -> Any:
        return self._vllm(body["prompt"], body, body, "completions")

    def _vllm_chat(self, body: dict[str, Any]) -> Any:
        return self._vllm(chat_ids(body["messages"]), body, body, "chat")

    def _vllm_generate(self, body: dict[str, Any]) -> Any:
        return self._vllm(body["token_ids"], body, body["sampling_params"], "generate")


def _streamed(answer: dict[str, Any]) -> list[bytes]:
    """Server-sent events: what was sampled so far, and the routes in the last alone."""
    output = answer["output_ids"]
    info = {key: value for key, value in answer["meta_info"].items() if key != "routed_experts"}
    first = {**answer, "output_ids": output[:1]}
    first["meta_info"] = {**info, "completion_tokens": 1, "finish_reason": None}
    return [f"data: {json.dumps(event)}\n\n".encode() for event in (first, answer)] + [b"data: [DONE]\n\n"]


def _handler(server: EngineServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"]))
            if server.broken is not None:
                return self._send(500, server.broken.encode(), "text/html")
            answer = server.paths.get(self.path)
            if answer is None:
                return self._send(404, b'{"detail":"Not Found"}')
            try:
                found = answer(json.loads(text))
            except BadRequest as error:
                return self._send(400, json.dumps({"error": {"message": str(error)}}).encode())
            if isinstance(found, list) and found and isinstance(found[0], bytes):
                return self._send(200, b"".join(found), "text/event-stream")
            return self._send(200, json.dumps(found).encode())

        def _send(self, status: int, body: bytes, kind: str = "application/json") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Keep the tests' output clean."""

    return Handler


def post(url: str, body: dict[str, Any]) -> bytes:
    """Post JSON and return the answer's body as it came; urllib raises on a status of 400 and above."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return bytes(answer.read())


def events(stream: bytes) -> Iterator[dict[str, Any]]:
    """The objects of a stream of server-sent events."""
    for line in stream.decode().splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))
