"""Decodes vLLM's RequestOutput, and its answers over HTTP, as RoutedExperts.

    /v1/completions  choices[i].routed_experts; the ids only with return_token_ids, in each choice
    /v1/chat/...     the same, but the prompt's ids are at the top
    /inference/v1/generate   choices[i].token_ids always; the prompt's from 0.30 on, with return_token_ids

Three layouts of rows are told apart by their fields, not by the release:

    0.14, 0.16 to 0.20  [tokens - 1, layers, topk], int32, in-process only
    0.21                the prompt's rows apart, of MoE layers only, int16; lists over HTTP
    0.22 to 0.33        [tokens - 1 - start, layers, topk], uint8 or uint16; base64 of .npy over HTTP

What stands in vLLM's place is read, too: NeMo-RL's and rLLM's answers, and those of Megatron's own dynamic
inference, a DynamicInferenceRequest or an answer of its server with `moe_topk_indices`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npu_replay.compat import probe
from npu_replay.compat.vllm.engine_plan import device_of
from npu_replay.compat.vllm.releases import DROPPED_AT_STOP_STRING, FAULTS
from npu_replay.compat.vllm_ascend import releases as ascend
from npu_replay.errors import InvalidRoutes, ReplayError, quoted, whole_number
from npu_replay.rollout import server_answers
from npu_replay.rollout.admit import Missing
from npu_replay.rollout.envelope import MEGATRON, from_envelope, is_envelope, of_choice, of_gateway
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.payloads import any_array, token_ids
from npu_replay.rollout.release_rules import Fault, Source, Symptom, release
from npu_replay.rollout.server_answers import Tokens
from npu_replay.routes.checks import Array
from npu_replay.routes.routed_experts import RoutedExperts

# The last sampled token has no row, as it was never run. Over HTTP `usage` counts the tokens of all choices.
# Of a stream, the last output in-process (DELTA) and the last piece of /inference/v1/generate have all rows,
# and the last token ids only; other streams have none.
_ANSWER = "an answer of /v1/completions, /v1/chat/completions or /inference/v1/generate"
_NOT_FOUND = (
    "a path that this server hasn't got. From 0.30.0 on it serves /inference/v1/generate with "
    "--enable-scale-out alone (or --tokens-only)"
)
_SAMPLED = "generation_token_ids"
"""The sampled ids, as Megatron's server and NeMo-RL name them."""
_MEGATRON = Source(
    engine="Megatron's inference",
    faults=(
        Fault(
            Symptom.MISSING,
            cause="moe_enable_routing_replay was off in the model's config, or the request was evicted and "
            "went on as another",
        ),
    ),
)


def from_vllm(
    output: Any,
    model: Any,
    *,
    prompt_token_ids: Any = None,
    output_token_ids: Any = None,
    start: int = 0,
    version: str | None = None,
    vllm_ascend: str | None = None,
    weight_version: int | str | None = None,
    missing: Missing = "error",
) -> list[RoutedExperts]:
    """Return the checked routes of one request, one RoutedExperts for each of its completions.

    >>> choice = {"prompt_token_ids": [11, 12], "token_ids": [13], "routed_experts": [[[3, 1]], [[2, 0]]]}
    >>> model = npu_replay.RoutedModel(layers=(0,), num_layers=1, num_experts=4, topk=2)
    >>> [routes] = npu_replay.from_vllm({"choices": [choice]}, model)
    >>> routes.ids[:2, 0].tolist()
    [[3, 1], [2, 0]]

    Args:
        output: a RequestOutput; or an answer of /v1/completions, /v1/chat/completions or
            /inference/v1/generate, as a dict, as JSON (str or bytes) or as OpenAI's client returns it;
            or a DynamicInferenceRequest of Megatron's.
        model: a RoutedModel, or a Hugging Face config: its path or its folder's, its contents, an object.
        prompt_token_ids: [prompt], if the output lacks them; or one such list per completion.
        output_token_ids: the sampled ids, one list per completion, if the output lacks them (request them
            with return_token_ids), or if tokens were removed from its end. Their number then follows from the
            output's own ids, or from the `usage` of an answer with one choice.
        start: the routed_experts_prompt_start that the request was sent with.
        version: vLLM's release, for the words of errors. When not given, an answer over HTTP tells it; for a
            RequestOutput it is the installed one, if `vllm_ascend` isn't given either. One that names no
            release («nightly») stands for any.
        vllm_ascend: vllm-ascend's release, likewise.
        weight_version: the weights that sampled. When not given, the one that vLLM names for all tokens.
        missing: "native" leaves rows that stand for none in all layers (zeros, -1, consecutive ids), or are
            another token's, without a route, and so a completion whose routes vLLM is known to drop; "error"
            refuses them.

    Returns:
        Each of len(prompt) + len(sampled) rows, with the fingerprint of both, in the order of the engine's
        own numbers. The last row has no route (but where tokens were taken off behind it), nor have those
        before `start`, nor has any row of an aborted request that has none.

    Raises:
        InvalidRoutes: a check fails; the error names the request, the field and the release's likeliest
            fault.
        ReplayError: the model's config lacks a required value.
    """
    known = RoutedModel.of(model)
    answers = read(output, version, vllm_ascend)
    start = whole_number(start, "start", where="from_vllm")
    prompts = _one_each(prompt_token_ids, len(answers), "prompt_token_ids")
    outputs = _one_each(output_token_ids, len(answers), "output_token_ids")
    if answers[0].first_prompt is None:
        answers = [replace(answer, first_prompt=prompts[0]) for answer in answers]
    return [
        answer.routes(known, prompt, sampled, start, missing, weight_version)
        for answer, prompt, sampled in zip(answers, prompts, outputs, strict=True)
    ]


def _one_each(value: Any, count: int, name: str) -> list[Any]:
    """Return what the caller gave for each completion: the same list for all, or one list each."""
    if isinstance(value, (list, tuple)):
        nested = bool(value) and (isinstance(value[0], (list, tuple)) or getattr(value[0], "ndim", 0) > 0)
    else:
        nested = getattr(value, "ndim", 0) == 2
    if not nested and (value is None or name == "prompt_token_ids" or count == 1):
        return [value] * count
    ReplayError.unless(
        nested and len(value) == count,
        f"{name} doesn't fit the completions",
        where="from_vllm",
        expected=f"{count} lists of token ids",
        got=f"{len(value)} lists" if nested else "one list",
    )
    return list(value)


# ---- the rows of an answer


@dataclass(frozen=True, kw_only=True)
class VllmAnswer(server_answers.EngineAnswer):
    """Holds one completion of vLLM, the request's `number`-th; `http` says how it came.

    Attributes:
        prompt_payload: the prompt's rows, if they are kept apart; they are the first completion's.
        first_prompt: the ids of the first completion's prompt, if known.
        stop_string: a stop string ended it. vLLM looks for those outside of its scheduler.
    """

    number: int
    http: bool
    prompt_payload: Any = None
    first_prompt: Any = None
    stop_string: bool = False
    aborts = ("abort", "error")
    asks = "return_token_ids=true in the request, or "

    def rows(self, model: RoutedModel, tokens: Tokens, start: int, missing: Missing) -> Array | None:
        apart = self.prompt_payload is not None
        if apart and self.first_prompt is not None:
            source = replace(self.source, field="prompt_routed_experts")
            if not np.array_equal(token_ids(self.first_prompt, source), tokens.ids[: tokens.prompt]):
                raise source.error(
                    Symptom.TOO_FEW_ROWS,
                    "the answer is to several prompts, and has the rows of the first alone",
                    "one prompt a request",
                    "another prompt than the first completion's",
                )
        if self.payload is None:
            # The prompt's rows alone are no routes of a completion whose own are lost.
            due = tokens.sampled > 1 if apart else tokens.prompt + tokens.sampled - 1 > start
            dropped = self.stop_string and DROPPED_AT_STOP_STRING.holds(self.source.version)
            if due and self.ended and not (dropped and missing == "native"):
                if not self.finish and not self.http:
                    raise self.source.error(
                        Symptom.SHAPE,
                        "the request isn't finished, and routes come with its last output",
                        "the output whose finish_reason is set",
                        "finish_reason None",
                    )
                raise self.source.error(
                    Symptom.MISSING,
                    "the completion has no routes",
                    "an array of expert ids",
                    f"None, finished by «{self.finish or None}»",
                )
            if due or not apart:
                return None
        if apart:
            return self._rows_of_two_parts(model, tokens, start)
        if is_envelope(self.payload):
            count = max(0, tokens.prompt + tokens.sampled - 1 - start)
            return from_envelope(self.payload, start=start, due=count, source=self.source)
        return any_array(self.payload, source=self.source)

    def _rows_of_two_parts(self, model: RoutedModel, tokens: Tokens, start: int) -> Array:
        """Join the prompt's rows and the completion's, as 0.21.0 gives them."""
        source = self.source
        prompt = replace(self.source, field="prompt_routed_experts")
        if start:
            raise source.error(Symptom.SHAPE, "this release gives all rows of the prompt", "start=0", start)
        head = any_array(self.prompt_payload, source=prompt)
        if len(head) != tokens.prompt:  # the completion's rows would shift
            raise prompt.error(
                Symptom.SHAPE, "the prompt has another number of rows than tokens", tokens.prompt, len(head)
            )
        parts = [head if tokens.sampled else head[:-1]]  # without a sample the last token was never run
        if self.payload is not None:
            sampled = max(1, tokens.sampled)
            part = any_array(self.payload, source=source)
            parts.append(part[:-1] if len(part) == sampled else part)  # with MTP a row for each token
        filled = [part for part in parts if len(part)]
        if len({part.shape[1:] for part in filled}) > 1:
            raise source.error(
                Symptom.SHAPE,
                "the rows of the prompt and of the completion have other shapes",
                f"[..., {', '.join(map(str, parts[0].shape[1:]))}]",
                list(parts[1].shape),
            )
        rows = np.concatenate(filled) if filled else parts[0]
        # 0.21.0 puts MoE layers into the first columns, and may add empty ones, as it overlooks
        # first_k_dense_replace when it counts. vllm-ascend 0.21.0rc1 fills the same columns by label.
        used = len(model.sparse)
        return rows if rows[:, used:].any() else rows[:, :used]


# ---- the fields of an answer


def read(output: Any, version: str | None = None, vllm_ascend: str | None = None) -> list[VllmAnswer]:
    """Take an answer of vLLM apart, in the order of its choices' own numbers; nothing is decoded yet."""
    # Releases that the caller doesn't give are the answer's or, for a RequestOutput, the installed ones.
    if megatron := hasattr(output, "routing_indices"):
        rows = output.routing_indices
        prompt = output.prompt_tokens
        sampled = output.generated_tokens
        output = {"choices": [{MEGATRON: rows, "prompt_token_ids": prompt, _SAMPLED: sampled}]}
    output = server_answers.opened(output, "vLLM", _ANSWER, not_found=_NOT_FOUND)
    http = isinstance(output, Mapping)
    choices = _choices(output) if http else _outputs(output)
    if not choices:
        raise _wrong("the answer has no completions", "one at least", 0)
    for version_text in (version, vllm_ascend):
        release(version_text or "")  # raises for what is no text
    if http and version is None:
        version = said_release(output)
    elif not http and version is None and vllm_ascend is None:
        version = probe.installed("vllm")
        vllm_ascend = probe.installed("vllm-ascend")
    request = _text(_said(output, "id", "request_id"))
    usage = output.get("usage") if http and len(choices) == 1 else None
    place = "choices" if http else "outputs"
    captured = any(of_choice(choice)[0] is not None for _, choice in choices)
    beside, field = of_gateway(output, "routed_experts") if http and not captured else (None, "")
    if beside is not None and len(choices) > 1:
        raise _wrong(f"{field} has the routes of one choice", "n=1", f"{len(choices)} choices")
    answers: list[VllmAnswer] = []
    for number, choice in choices:
        finish = _text(_said(choice, "finish_reason"))
        (rows, name) = of_choice(choice)
        rows = beside if rows is None else rows
        stop_string = _text(_said(choice, "stop_reason")) is not None and finish in ("stop", "tool_calls")
        way = "alone" if captured and rows is None else "http" if http else "in-process"
        about = source(version or "", vllm_ascend or "", (way, "stop string") if stop_string else (way,))
        about = _MEGATRON if megatron or name == MEGATRON else about
        sample = f"completion {number}"
        sample = f"request {quoted(request)}, {sample}" if request else sample
        message = _said(choice, "message")  # where NeMo-RL and Megatron's chats have the ids
        prompt = _said(choice, "prompt_token_ids")
        ids = _said(choice, "token_ids", _SAMPLED)
        prompt = _said(output, "prompt_token_ids") if prompt is None else prompt
        prompt = _said(message, "prompt_token_ids") if prompt is None else prompt
        ids = _said(message, _SAMPLED) if ids is None else ids
        ids = of_gateway(output, "completion_token_ids")[0] if beside is not None and ids is None else ids
        # The engine's own weight version, if it names one for all tokens; 0.32's «default» is a placeholder.
        spans = _said(choice, "weight_versions")
        named = [_said(span, "version") for span in spans] if isinstance(spans, (list, tuple)) else []
        alike = bool(named) and named[0] != "default" and all(name_of == named[0] for name_of in named)
        answers.append(
            VllmAnswer(
                source=replace(about, sample=sample, field=field or f"{place}[{number}].{name}"),
                number=number,
                http=http,
                prompt_ids=prompt,
                output_ids=ids,
                prompt_tokens=_count(usage, "prompt_tokens") if prompt is None else None,
                completion_tokens=_count(usage, "completion_tokens") if ids is None else None,
                payload=rows,
                prompt_payload=_said(output, "prompt_routed_experts"),
                first_prompt=answers[0].prompt_ids if answers else prompt,
                finish=quoted(finish or ""),
                stop_string=stop_string,
                weight_version=quoted(named[0]) if alike and isinstance(named[0], str) else None,
            )
        )
    return answers


def source(version: str = "", vllm_ascend: str = "", ways: tuple[str, ...] = ("in-process",)) -> Source:
    """Return the source of these routes, for messages; `ways` are how they came, for `Fault.only`."""
    faults = (*ascend.faults(vllm_ascend), *FAULTS) if vllm_ascend else (*FAULTS, *ascend.guesses())
    device = device_of(version, vllm_ascend)
    return Source(engine="vLLM", version=version, device=device, faults=faults, ways=ways)


def said_release(answer: Mapping[str, Any]) -> str:
    """Return the release in an answer's fingerprint, «vllm-0.30.0-tp2-3ea666b7», or an empty text."""
    fingerprint = answer.get("system_fingerprint")
    match = re.match(r"vllm-(\d+\.[\w.+]+)", fingerprint) if isinstance(fingerprint, str) else None
    return match[1][:80] if match else ""


def _choices(answer: Mapping[str, Any]) -> list[tuple[int, Any]]:
    """List the choices of an answer over HTTP by their own numbers, or as they lie if one has none."""
    choices = answer.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
        keys = f"the keys {sorted(map(quoted, answer))[:8]}"
        raise _wrong("the answer has no choices", _ANSWER, keys, "another endpoint")
    indices = [_count(choice, "index") for choice in choices]
    numbers = [number for number in indices if number is not None]
    if len(set(numbers)) < len(choices):
        numbers = list(range(len(choices)))
    return sorted(zip(numbers, choices, strict=True), key=lambda numbered: numbered[0])


def _outputs(output: Any) -> list[tuple[int, Any]]:
    """List the completions of a RequestOutput, in its own order."""
    outputs = getattr(output, "outputs", None)
    if not isinstance(outputs, (list, tuple)):
        raise _wrong(
            "this isn't what vLLM gives for one request",
            "a RequestOutput, or an answer over HTTP as a dict or as JSON",
            type(output).__name__,
            "a list, as LLM.generate() returns it: take what is in it one by one; or beam search, which has "
            "no routes: sample instead",
        )
    return list(enumerate(outputs))


def _said(of: Any, *names: str) -> Any:
    """Return the first of these fields that is there, of a dict or of an object."""
    values = (of.get(name) if isinstance(of, Mapping) else getattr(of, name, None) for name in names)
    return next((value for value in values if value is not None), None)


def _count(of: Any, name: str) -> int | None:
    value = of.get(name) if isinstance(of, Mapping) else None
    return value if type(value) is int and value >= 0 else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _wrong(problem: str, expected: object, got: object, cause: str = "") -> InvalidRoutes:
    return InvalidRoutes(problem, where="vLLM", expected=expected, got=got, cause=cause)
