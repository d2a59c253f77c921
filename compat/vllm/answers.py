"""What vLLM hands out, in one form: its RequestOutput, and its answers over HTTP.

    in-process       RequestOutput: prompt_token_ids, outputs[i].token_ids, .routed_experts
    /v1/completions  choices[i].routed_experts; the ids only with return_token_ids, in each choice
    /v1/chat/...     the same, but the prompt's ids stand at the top
    /inference/v1/generate   choices[i].token_ids always; the prompt's from 0.30 on, with return_token_ids

0.21.0 keeps the prompt's rows apart, once for all completions, as `prompt_routed_experts`. Answers over HTTP
count their tokens in `usage`, over all choices.

Nothing is decoded here and no id is looked at. Nothing of vLLM is imported or changed.

Probes: nothing. Offers: `Completion`, `completions`. Nothing to undo.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from npu_replay.compat.vllm.faults import BEAMS, SCALE_OUT
from npu_replay.errors import InvalidRoutes
from npu_replay.rollout.server_answers import opened

_NOT_ENDED = ("abort", "error")
_ANSWER = "an answer of /v1/completions, /v1/chat/completions or /inference/v1/generate"
_NOT_FOUND = (
    f"a path that this server hasn't got. From {SCALE_OUT} on it serves /inference/v1/generate with "
    "--enable-scale-out alone (or --tokens-only)"
)


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One completion of one request, as it came.

    Attributes:
        request: the engine's name for the request; empty where it has none.
        number: which of the request's completions it is, as the engine counts them.
        position: its place in the answer's list.
        http: did it come over HTTP?
        prompt: the prompt's token ids; None where the answer hasn't got them.
        sampled: those that were sampled.
        rows: an array, base64 text or nested lists; None where there are none.
        prompt_rows: the prompt's, where they are kept apart.
        finish_reason: the engine's word for why it ended; None if it didn't say.
        stop_reason: the stop string that ended it, if one did.
        weight_versions: the engine's own spans of weight versions, where it gives them.
        version: the engine's release, where an answer over HTTP says it (`system_fingerprint`).
        prompt_count, sampled_count: how many ids of each the engine ran, where an answer over HTTP says so of
            this completion alone.
    """

    request: str
    number: int
    position: int
    http: bool
    prompt: Any
    sampled: Any
    rows: Any
    prompt_rows: Any
    finish_reason: str | None
    stop_reason: str | None
    weight_versions: Any
    version: str = ""
    prompt_count: int | None = None
    sampled_count: int | None = None

    @property
    def sample(self) -> str:
        """«request cmpl-17, completion 2»."""
        return ", ".join(part for part in (self.request, f"completion {self.number}") if part)

    @property
    def place(self) -> str:
        """«choices[2]»: where it lies in the answer."""
        return f"{'choices' if self.http else 'outputs'}[{self.number}]"

    @property
    def ended(self) -> bool:
        """Did it end by itself? One that was aborted may have no rows."""
        return self.finish_reason not in _NOT_ENDED

    @property
    def stop_string(self) -> bool:
        """Did a stop string end it? vLLM looks for those outside of its scheduler. (Chat says «tool_calls»
        for «stop»; a repetition that was noticed has a stop_reason too.)"""
        return self.stop_reason is not None and self.finish_reason in ("stop", "tool_calls")


def completions(output: Any) -> list[Completion]:
    """Take an answer of vLLM apart, in the order of its choices' own numbers.

    Args:
        output: a RequestOutput, or anything with its attributes; an answer over HTTP as a dict, as JSON, or
            as the object that OpenAI's client makes of it.

    Raises:
        InvalidRoutes: it is something else, an error message, or a piece of a stream.
    """
    output = opened(output, "vLLM", _ANSWER, not_found=_NOT_FOUND)
    found = _of_response(output) if isinstance(output, Mapping) else _of_request_output(output)
    if not found:
        raise _wrong("the answer has no completions", "one at least", 0)
    return found


def _of_response(answer: Mapping[str, Any]) -> list[Completion]:
    choices = answer.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
        raise _wrong(
            "the answer has no choices",
            _ANSWER,
            f"the keys {sorted(map(str, answer))[:8]}",
            "another endpoint",
        )
    if any("delta" in choice for choice in choices):
        raise _wrong(
            "this is a piece of a stream, and streams carry no routes",
            "stream=False",
            f"object {answer.get('object')!r}",
            "vLLM puts routes into whole answers alone",
        )
    name = answer.get("id", answer.get("request_id"))
    counts = _counts(answer.get("usage")) if len(choices) == 1 else (None, None)
    found = [
        Completion(
            request=_request(name),
            number=number,
            position=position,
            http=True,
            prompt=_first(choice.get("prompt_token_ids"), answer.get("prompt_token_ids")),
            sampled=choice.get("token_ids"),
            rows=choice.get("routed_experts"),
            prompt_rows=answer.get("prompt_routed_experts"),
            finish_reason=_word(choice.get("finish_reason")),
            stop_reason=_word(choice.get("stop_reason")),
            weight_versions=choice.get("weight_versions"),
            version=_release(answer.get("system_fingerprint")),
            prompt_count=counts[0],
            sampled_count=counts[1],
        )
        for position, (number, choice) in enumerate(zip(_numbers(choices), choices, strict=True))
    ]
    return sorted(found, key=lambda one: one.number)


def _numbers(choices: list[Mapping[str, Any]]) -> list[int]:
    """The choices' own, where each has one; else as they lie."""
    said = [choice.get("index") for choice in choices]
    numbers = [number for number in said if type(number) is int and number >= 0]
    return numbers if len(set(numbers)) == len(choices) else list(range(len(choices)))


def _counts(usage: Any) -> tuple[int | None, int | None]:
    """Of the prompt's ids and of those sampled."""
    said = usage if isinstance(usage, Mapping) else {}
    prompt, sampled = (_count(said.get(name)) for name in ("prompt_tokens", "completion_tokens"))
    return prompt, sampled


def _count(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _of_request_output(output: Any) -> list[Completion]:
    outputs = getattr(output, "outputs", None)
    if hasattr(output, "sequences") and outputs is None:
        raise _wrong("beam search gives no routes", "a RequestOutput", type(output).__name__, BEAMS)
    if isinstance(output, Sequence) or not isinstance(outputs, (list, tuple)):
        several = isinstance(output, Sequence) and any(
            hasattr(one, "outputs") or isinstance(one, Mapping) for one in output[:1]
        )
        raise _wrong(
            "this isn't what vLLM gives for one request",
            "a RequestOutput, or an answer over HTTP as a dict or as JSON",
            f"{type(output).__name__} of {len(output)}" if several else type(output).__name__,
            "a list, as LLM.generate() returns it: take what is in it one by one" if several else "",
        )
    return [
        Completion(
            request=_request(getattr(output, "request_id", None)),
            number=number,
            position=number,
            http=False,
            prompt=getattr(output, "prompt_token_ids", None),
            sampled=getattr(one, "token_ids", None),
            rows=getattr(one, "routed_experts", None),
            prompt_rows=getattr(output, "prompt_routed_experts", None),
            finish_reason=_word(getattr(one, "finish_reason", None)),
            stop_reason=_word(getattr(one, "stop_reason", None)),
            weight_versions=getattr(one, "weight_versions", None),
        )
        for number, one in enumerate(outputs)
    ]


def _request(name: Any) -> str:
    return f"request {name[:80]}" if isinstance(name, str) and name else ""


def _release(fingerprint: Any) -> str:
    """«vllm-0.30.0-tp2-3ea666b7», or another's fingerprint, or the user's own words."""
    found = re.match(r"vllm-(\d+\.[\w.+]+)", fingerprint) if isinstance(fingerprint, str) else None
    return found[1][:80] if found else ""


def _word(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _wrong(problem: str, expected: object, got: object, cause: str = "") -> InvalidRoutes:
    return InvalidRoutes(problem, where="vLLM", expected=expected, got=got, cause=cause)
