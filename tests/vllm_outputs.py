"""The true routes of a sequence as each release of vLLM hands them out: its objects, its answers over HTTP.

Written after the released source: `v1/core/sched/scheduler.py` and `v1/engine/output_processor.py` for the
rows, `outputs.py` for the objects, `entrypoints/*/protocol.py` and `serving.py` for the answers.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from npu_replay import RoutedExperts, fingerprint
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.release_rules import release
from npu_replay.routes.checks import Array

Endpoint = Literal["completions", "chat", "generate"]

QWEN = RoutedModel(layers=tuple(range(6)), num_layers=6, num_experts=128, topk=8)
DEEPSEEK = RoutedModel(layers=(2, 3, 4, 5, 6), num_layers=7, num_experts=256, topk=8)
WIDE = RoutedModel(layers=(1, 2, 3, 5), num_layers=6, num_experts=512, topk=10)
"""More experts than a byte counts, and a dense layer in between."""


@dataclass(frozen=True, eq=False)
class Sampled:
    """What one completion really was.

    Attributes:
        prompt, output: its token ids.
        rows: [len(prompt) + len(output), MoE layers, topk], int64; the last for the token that wasn't run.
        finish_reason, stop_reason: as vLLM says them.
    """

    prompt: list[int]
    output: list[int]
    rows: Array
    finish_reason: str | None = "length"
    stop_reason: int | str | None = None

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


@dataclass
class CompletionOutput:
    """Of its attributes in every release that knows routes, those that a decoder may ask for."""

    index: int
    token_ids: Any
    routed_experts: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """The same of one up to 0.20 and from 0.22 on."""

    request_id: str
    prompt_token_ids: Any
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = True


@dataclass
class RequestOutput021(RequestOutput):
    """The one of 0.21.0."""

    prompt_routed_experts: Any = None


def sampled(model: RoutedModel, prompt: int = 70, output: int = 40, seed: int = 0, **fields: Any) -> Sampled:
    """A sequence whose routes depend on the token: distinct experts in each row, spread over all of them."""
    chance = np.random.default_rng(seed)
    tokens = chance.integers(0, 150_000, prompt + output).tolist()
    rows = chance.random((prompt + output, len(model.layers), model.num_experts)).argsort(axis=2)
    return Sampled(tokens[:prompt], tokens[prompt:], rows[..., : model.topk], **fields)


def siblings(model: RoutedModel, count: int, **fields: Any) -> list[Sampled]:
    """Completions of one prompt: the prompt's rows are the same in each."""
    first = sampled(model, seed=0, **fields)
    samples = [first]
    for number in range(1, count):
        other = sampled(model, output=30 + number, seed=number, **fields)
        rows = other.rows.copy()
        rows[: len(first.prompt)] = first.rows[: len(first.prompt)]
        samples.append(Sampled(first.prompt, other.output, rows, other.finish_reason, other.stop_reason))
    return samples


def expected(
    model: RoutedModel, sample: Sampled, *, start: int = 0, rows: int | None = None
) -> RoutedExperts:
    """What has to come out: rows `start` to before `rows`, all that were run when not given."""
    recorded = np.zeros(len(sample.tokens), bool)
    recorded[start : len(sample.tokens) - 1 if rows is None else rows] = True
    return RoutedExperts(
        ids=sample.rows,
        layers=model.layers,
        num_experts=model.num_experts,
        recorded=recorded,
        fingerprint=fingerprint(sample.tokens),
    )


def request_output(version: str, model: RoutedModel, *completions: Sampled, start: int = 0) -> RequestOutput:
    """A RequestOutput of that release, finished."""
    made = RequestOutput021 if _is_split(version) else RequestOutput
    request = made(request_id="17", prompt_token_ids=completions[0].prompt)
    for index, completion in enumerate(completions):
        rows = engine_rows(version, model, completion, start)
        if isinstance(request, RequestOutput021):
            request.prompt_routed_experts = rows[: len(completion.prompt)]
            rows = rows[len(completion.prompt) :]
        request.outputs.append(
            CompletionOutput(
                index=index,
                token_ids=completion.output,
                routed_experts=rows if len(rows) else None,
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
            )
        )
    return request


def answer(
    version: str,
    model: RoutedModel,
    *completions: Sampled,
    endpoint: Endpoint = "completions",
    start: int = 0,
    with_ids: bool = True,
) -> dict[str, Any]:
    """The JSON of that release's server, as a dict; `with_ids` is return_token_ids=true in the request."""
    request = request_output(version, model, *completions, start=start)
    usage = {
        "prompt_tokens": len(request.prompt_token_ids),
        "completion_tokens": sum(len(completion.output) for completion in completions),
    }
    body: dict[str, Any] = {"choices": [], "usage": usage}
    for completion in request.outputs:
        choice = {
            "index": completion.index,
            "finish_reason": completion.finish_reason,
            "routed_experts": _on_the_wire(completion.routed_experts),
        }
        if endpoint != "generate" or release(version) >= release("0.32.0"):
            choice["stop_reason"] = completion.stop_reason
        if endpoint == "completions":
            choice |= {"text": "", "prompt_token_ids": request.prompt_token_ids if with_ids else None}
        if endpoint == "chat":
            choice |= {"message": {"role": "assistant", "content": ""}}
        choice["token_ids"] = completion.token_ids if with_ids or endpoint == "generate" else None
        body["choices"].append(choice)
    if endpoint == "completions":
        body |= {"id": "cmpl-17", "object": "text_completion"}
    elif endpoint == "chat":
        body |= {"id": "chatcmpl-17", "object": "chat.completion"}
        body["prompt_token_ids"] = request.prompt_token_ids if with_ids else None
    else:
        body["request_id"] = "17"
        if release(version) >= release("0.30.0"):
            body["prompt_token_ids"] = request.prompt_token_ids if with_ids else None
    if isinstance(request, RequestOutput021):
        body["prompt_routed_experts"] = _on_the_wire(request.prompt_routed_experts)
    return body


def engine_rows(version: str, model: RoutedModel, sample: Sampled, start: int = 0) -> Array:
    """The rows that the engine has: none for the last token, in its columns and its dtype."""
    rows = sample.rows[start : len(sample.tokens) - 1]
    columns = model.layers
    if _is_split(version):
        columns = tuple(range(len(model.layers)))  # numbered as they are made
    ids = np.zeros((len(rows), _columns(version, model), model.topk), _dtype(version, model))
    ids[:, list(columns)] = rows
    return ids


def _columns(version: str, model: RoutedModel) -> int:
    """0.21.0 leaves out dense layers that mlp_only_layers lists, and overlooks those that
    first_k_dense_replace counts, which are DeepSeek's: then its last columns stay empty."""
    return len(model.layers) if _is_split(version) and model is not DEEPSEEK else model.num_layers


def _dtype(version: str, model: RoutedModel) -> Any:
    if release(version) < release("0.21.0"):
        return np.int32
    if _is_split(version):
        return np.int16
    return np.uint8 if model.num_experts <= 256 else np.uint16


def _is_split(version: str) -> bool:
    return release(version)[:2] == (0, 21)


def _on_the_wire(rows: Array | None) -> Any:
    """Lists in 0.21.0, whose dtype is int16; .npy as base64 later."""
    if rows is None:
        return None
    return rows.tolist() if rows.dtype == np.int16 else npy(rows)


def npy(rows: Any) -> str:
    """Base64 of the .npy of an array."""
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=True)
    return base64.b64encode(buffer.getvalue()).decode("ascii")
