"""What vLLM hands out, in one form: its RequestOutput, and its answers over HTTP.

    in-process       RequestOutput: prompt_token_ids, outputs[i].token_ids, .routed_experts
    /v1/completions  choices[i].routed_experts; the ids only with return_token_ids, in each choice
    /v1/chat/...     the same, but the prompt's ids stand at the top
    /inference/v1/generate   choices[i].token_ids always; the prompt's from 0.30 on, with return_token_ids

0.21.0 keeps the prompt's rows apart, once for all completions, as `prompt_routed_experts`. Answers over HTTP
count their tokens in `usage`, over all choices. Of a stream, the last output in-process (DELTA) and the last
piece of /inference/v1/generate have all rows, and the last token ids alone; other streams have none. Nothing
is decoded here. Nothing of vLLM is imported.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npu_replay.compat import probe
from npu_replay.compat.vllm.launch import device_of
from npu_replay.compat.vllm.releases import BEAMS, FAULTS
from npu_replay.compat.vllm_ascend import releases as ascend
from npu_replay.errors import InvalidRoutes
from npu_replay.rollout import server_answers
from npu_replay.rollout.release_rules import Source, release

_ANSWER = "an answer of /v1/completions, /v1/chat/completions or /inference/v1/generate"
_NOT_FOUND = (
    "a path that this server hasn't got. From 0.30.0 on it serves /inference/v1/generate with "
    "--enable-scale-out alone (or --tokens-only)"
)


@dataclass(frozen=True, kw_only=True)
class Answer(server_answers.Answer):
    """One completion of vLLM's.

    Attributes:
        number: which of the request's completions it is, as the engine counts them.
        http: did it come over HTTP?
        prompt_payload: the prompt's rows, where they are kept apart.
        another_prompt: are those the rows of another prompt? They are the first completion's.
        stop_string: did a stop string end it? vLLM looks for those outside of its scheduler.
    """

    number: int
    http: bool
    prompt_payload: Any = None
    another_prompt: bool = False
    stop_string: bool = False
    aborts = ("abort", "error")

    @property
    def place(self) -> str:
        """«choices[2]»: where it lies in the answer."""
        return f"{'choices' if self.http else 'outputs'}[{self.number}]"


def read(output: Any, version: str | None = None, vllm_ascend: str | None = None) -> list[Answer]:
    """Take an answer of vLLM apart, in the order of its choices' own numbers.

    Args:
        output: a RequestOutput, or anything with its attributes; an answer over HTTP as a dict, as JSON, or
            as the object that OpenAI's client makes of it.
        version, vllm_ascend: the releases, as far as the caller says. Else an answer over HTTP is asked for
            vLLM's; for an output of this process it is what is installed.

    Raises:
        InvalidRoutes: it is something else, an error message, or a piece of a chat's stream.
    """
    output = server_answers.opened(output, "vLLM", _ANSWER, not_found=_NOT_FOUND)
    http = isinstance(output, Mapping)
    choices = _choices(output) if http else _outputs(output)
    if not choices:
        raise _wrong("the answer has no completions", "one at least", 0)
    for said in (version, vllm_ascend):
        release(said or "")  # or an error, for what is no text
    if http and version is None:
        version = said_release(output)
    elif not http and version is None and vllm_ascend is None:
        version, vllm_ascend = probe.installed("vllm"), probe.installed("vllm-ascend")
    version, vllm_ascend = version or "", vllm_ascend or ""
    request = _text(_said(output, "id", "request_id"))
    counts = output.get("usage") if http and len(choices) == 1 else None
    shared, first = _said(output, "prompt_routed_experts"), _prompt(output, choices[0][1])
    captured = any(_said(choice, "routed_experts") is not None for _, choice in choices)
    found = []
    for number, choice in choices:
        finish, rows = _text(_said(choice, "finish_reason")), _said(choice, "routed_experts")
        stop_string = _text(_said(choice, "stop_reason")) is not None and finish in ("stop", "tool_calls")
        prompt = _prompt(output, choice)
        way = "alone" if captured and rows is None else "http" if http else "in-process"
        found.append(
            Answer(
                source=replace(
                    source(version, vllm_ascend, (way, "stop string") if stop_string else (way,)),
                    sample=", ".join(
                        [*([f"request {request[:80]}"] if request else []), f"completion {number}"]
                    ),
                    field=f"{'choices' if http else 'outputs'}[{number}].routed_experts",
                ),
                number=number,
                http=http,
                prompt_ids=prompt,
                output_ids=_said(choice, "token_ids"),
                prompt_tokens=_count(counts, "prompt_tokens"),
                completion_tokens=_count(counts, "completion_tokens"),
                payload=rows,
                prompt_payload=shared,
                another_prompt=shared is not None and differ(first, prompt),
                finish=finish or "",
                stop_string=stop_string,
                weight_version=_weights(_said(choice, "weight_versions")),
            )
        )
    return found


def source(version: str = "", vllm_ascend: str = "", ways: tuple[str, ...] = ("in-process",)) -> Source:
    """Whose routes these are, for messages about what vLLM made, with its known faults.

    Args:
        version, vllm_ascend: the releases; empty where nobody says.
        ways: how they came, for `Fault.only`: «in-process», «http» or «alone», and «stop string».
    """
    faults = (*ascend.faults(vllm_ascend), *FAULTS) if vllm_ascend else (*FAULTS, *ascend.guesses())
    device = device_of(version, vllm_ascend)
    return Source(engine="vLLM", version=version, device=device, faults=faults, ways=ways)


def differ(first: Any, prompt: Any) -> bool:
    """Are these two prompts, as far as both are known?"""
    return first is not None and prompt is not None and not np.array_equal(first, prompt)


def _choices(answer: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """Of an answer over HTTP, by their own numbers where each has one; else as they lie."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
        keys = f"the keys {sorted(map(str, answer))[:8]}"
        raise _wrong("the answer has no choices", _ANSWER, keys, "another endpoint")
    if any("delta" in choice for choice in choices):
        raise _wrong(
            "this is a piece of a stream of a chat, which carries no routes",
            "stream=False",
            f"object {answer.get('object')!r}",
            "vLLM puts routes into whole answers, and into the last piece of /inference/v1/generate's stream",
        )
    said = [_count(choice, "index") for choice in choices]
    numbers = [number for number in said if number is not None]
    if len(set(numbers)) < len(choices):
        numbers = list(range(len(choices)))
    return sorted(zip(numbers, choices, strict=True), key=lambda one: one[0])


def _outputs(output: Any) -> list[tuple[int, Any]]:
    """Of a RequestOutput, in its own order."""
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
    return list(enumerate(outputs))


def _said(of: Any, *names: str) -> Any:
    """The first of these that is there, of a dict or of an object."""
    get = of.get if isinstance(of, Mapping) else functools.partial(getattr, of)
    return next((value for name in names if (value := get(name, None)) is not None), None)


def _prompt(output: Any, choice: Any) -> Any:
    own = _said(choice, "prompt_token_ids")
    return _said(output, "prompt_token_ids") if own is None else own


def _count(of: Any, name: str) -> int | None:
    value = of.get(name) if isinstance(of, Mapping) else None
    return value if type(value) is int and value >= 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def said_release(answer: Mapping[str, Any]) -> str:
    """The release that an answer over HTTP says itself, or nothing: its fingerprint is
    «vllm-0.30.0-tp2-3ea666b7», or another's, or the user's own words."""
    fingerprint = answer.get("system_fingerprint")
    found = re.match(r"vllm-(\d+\.[\w.+]+)", fingerprint) if isinstance(fingerprint, str) else None
    return found[1][:80] if found else ""


def _weights(spans: Any) -> str | None:
    """The engine's own weight version, where it names one for all tokens; 0.32's «default» says nothing."""
    named = [_said(span, "version") for span in spans] if isinstance(spans, (list, tuple)) else []
    alike = bool(named) and all(one == named[0] for one in named)
    return _text(named[0]) if alike and named[0] != "default" else None


def _wrong(problem: str, expected: object, got: object, cause: str = "") -> InvalidRoutes:
    return InvalidRoutes(problem, where="vLLM", expected=expected, got=got, cause=cause)
