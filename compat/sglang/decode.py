"""Decode the routes in an answer of SGLang, from whichever endpoint, as checked RoutedExperts.

The ids come flat and without a shape: [rows, decoder layers, top-k], int32, with a row for each token but the
last. Only their count can show a wrong model, a missing row or another request's routes, so it is checked
against what this release sends. Nothing of SGLang is imported or changed.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from npu_replay.compat.sglang.releases import FAULTS, HONOURS_START, STOPS_EXACTLY
from npu_replay.errors import quoted, whole_number
from npu_replay.rollout import server_answers
from npu_replay.rollout.admit import Missing
from npu_replay.rollout.envelope import from_envelope, is_envelope, of_choice, of_gateway
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.payloads import TokenIds, as_numpy, from_lists, ids_from_base64
from npu_replay.rollout.release_rules import Source, Symptom, release, tells_release
from npu_replay.rollout.server_answers import Tokens
from npu_replay.routes.checks import Array
from npu_replay.routes.routed_experts import RoutedExperts

logger = logging.getLogger(__name__)

_FORMS = "meta_info, or the whole answer of /generate or of an OpenAI endpoint"
_OUTPUT = ("output_ids", "token_ids", "response_token_ids")  # by endpoint
_KIMI_STUB = 3
"""SGLang 0.5.17 and later leave this many tokens of a Kimi-K3 chat's prompt out of its usage."""
_TAKEN_BACK = 64
"""The most of the engine's tokens that the caller may have removed from the end: those of a stop string."""
_STOPPED = ("stop", "tool_calls", "function_call")
"""Finish reasons of a request that ends at a stop string, whose tokens the caller may have removed."""


def from_sglang(
    meta_info: Any,
    model: Any,
    *,
    prompt_token_ids: TokenIds | None = None,
    output_ids: TokenIds | None = None,
    start_len: int = 0,
    version: str | None = None,
    weight_version: int | str | None = None,
    missing: Missing = "error",
) -> RoutedExperts:
    """Return the routes of one sequence, from one answer of SGLang.

    >>> import base64
    >>> ids = np.array([[[3, 1]], [[2, 0]]], "<i4")
    >>> answer = {"meta_info": {"routed_experts": base64.b64encode(ids.tobytes()).decode()}}
    >>> model = npu_replay.RoutedModel(layers=(0,), num_layers=1, num_experts=4, topk=2)
    >>> npu_replay.from_sglang(answer, model, prompt_token_ids=[11, 12], output_ids=[13]).ids[:2, 0].tolist()
    [[3, 1], [2, 0]]

    Args:
        meta_info: the answer's meta_info, or the whole answer of /generate, of `Engine.generate` or of an
            OpenAI endpoint, or one of its choices; as a dict, as JSON (str or bytes), or as OpenAI's client
            returns it. It isn't changed. `{"sglext": ...}` or `{"meta_info": ...}` alone is enough.
        model: a RoutedModel, or what one can be made of: a config, its path, a model.
        prompt_token_ids, output_ids: the ids that the engine was given and those that it sampled, [n]
            integers. When not given they are taken from the answer, if it repeats them.
        start_len: the request's routed_experts_start_len; rows before it have no route.
        version: the engine's release, such as «0.5.12», for the number of rows that it sends and the words
            of errors. Rows that releases before 0.5.13 computed past the end of a request are an error.
        weight_version: the weights that sampled; when not given, those that the answer names.
        missing: "native" leaves rows without a route where the engine has none that fits the log-probs.

    Returns:
        [prompt and output tokens] rows over the model's MoE layers. The last token was never run and has no
        route, but where tokens were taken off behind it.

    Raises:
        InvalidRoutes: the answer is wrong; the error names the fault of SGLang's that causes it.
        ReplayError: `model` says too little.
        TypeError: `version` is no text.
    """
    known = RoutedModel.of(model)
    start = whole_number(start_len, "start_len", where="from_sglang")
    release(version or "")  # raises for what is no text
    answer = read(meta_info, version if version and tells_release(version, numbers=3) else "")
    return answer.routes(known, prompt_token_ids, output_ids, start, missing, weight_version)


# ---- the rows of an answer


class WeightSpan(NamedTuple):
    """States that output tokens from `start` to before `end` were sampled under the weights `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class SglangAnswer(server_answers.EngineAnswer):
    """Holds one answer of SGLang.

    Attributes:
        weight_spans: the weights that sampled each part of the output, in SGLang 0.5.19 and later.
        retractions: how often the request was retracted and computed again.
    """

    weight_spans: tuple[WeightSpan, ...] = ()
    retractions: int = 0
    arguments = ("prompt_token_ids", "output_ids")

    def rows(self, model: RoutedModel, tokens: Tokens, start: int, missing: Missing) -> Array | None:
        source = self.source
        taken_off = tokens.taken_off
        repeated = self.output_ids is not None and len(self.output_ids) == tokens.sampled
        if taken_off > _TAKEN_BACK or (taken_off and not repeated and self.finish not in _STOPPED):
            raise self.other_tokens(1, f"{tokens.sampled} ids", tokens.sampled - taken_off)
        end = max(0, len(tokens.ids) - 1) + taken_off  # the last token was never run
        start = min(start, end)
        data = as_numpy(self.payload)
        if is_envelope(data):
            data = from_envelope(data, start=start, due=end - start, source=source)
        elif isinstance(data, list) and data:  # LMDeploy's
            data = from_lists(data, source=source)
        if data is None or (isinstance(data, list) and not data):  # 0.5.8 says [] for none
            if start == end or not self.ended:
                return None
            raise source.error(
                Symptom.MISSING, "there are no routes in the answer", f"{end - start} rows", "none"
            )
        if isinstance(data, (str, bytes)):
            data = ids_from_base64(data, source=source)
        elif not isinstance(data, np.ndarray) or data.dtype.kind not in "iu":
            raise source.unreadable(
                "these aren't expert ids",
                "base64 of int32, or integers",
                getattr(data, "dtype", type(data).__name__),
            )
        first = self._skipped(data, model, start, end)
        rows: Array = data if data.ndim == 3 else data.reshape(-1, model.num_layers, model.topk)
        return rows[first : first + end - start]

    def _skipped(self, data: Array, model: RoutedModel, start: int, end: int) -> int:
        """Return how many of the first rows, of ids that are flat or shaped, weren't asked for."""
        known = self.source.version
        sent_from = 0 if known and release(known) < release(HONOURS_START) else start
        ids_a_row = model.num_layers * model.topk
        rows, rest = (len(data), 0) if data.ndim == 3 else divmod(data.size, ids_a_row)
        due = end - sent_from
        if rest:
            raise self.source.error(
                Symptom.COLUMNS,
                f"{data.size} ids can't be shaped",
                f"{due * ids_a_row}: {due} rows of {model.num_layers} layers with top-{model.topk}",
                f"{rows} rows and {rest} ids",
            )
        if rows == due:
            return start - sent_from
        # The request may not have carried the start. 0.5.12 may send rows past the end instead.
        if rows == end and not (known and release(known) < release(STOPS_EXACTLY)):
            return start
        if rows == 0 and not self.ended:
            return 0
        raise self.source.error(
            Symptom.TOO_FEW_ROWS if rows < due else Symptom.TOO_MANY_ROWS,
            "the engine has rows for other tokens than these, or of another model",
            f"{due} rows of {model.num_layers} layers with top-{model.topk}, from token {sent_from} on; the "
            "last token has none",
            rows,
        )

    def trusted(self, routes: RoutedExperts, tokens: Tokens, missing: Missing) -> RoutedExperts:
        """Remove the rows of a retracted request whose log-probs other weights made."""
        # A retracted request keeps its tokens and log-probs, and its routes are computed again: if the
        # weights changed in between, the routes don't belong to the log-probs.
        if self.retractions and not self.weight_spans:
            _warn_of_retractions(self.source.version)
        if not self.retractions or len(self.weight_spans) < 2:
            return routes
        spans = self.weight_spans
        newest = self.weight_spans[-1].start
        if missing == "error":
            raise replace(self.source, faults=()).error(
                Symptom.STALE_ROWS,
                f"the request was retracted {self.retractions} times, and the weights changed under it: the "
                f"routes of its first {newest} output tokens were computed again, their log-probs weren't",
                "routes that sampled the tokens (missing='native' leaves those rows without a route)",
                ", ".join(f"weights {span.version} for tokens {span.start} to {span.end}" for span in spans),
            )
        recorded = routes.recorded.clone()
        first = max(0, tokens.prompt - 1)  # the row that the first output token was sampled from
        recorded[first : max(0, first + newest)] = False
        ids = routes.ids.masked_fill(~recorded[:, None, None], 0)
        return routes.with_rows(ids, recorded, fingerprint=routes.fingerprint)


@functools.lru_cache(maxsize=8)  # warns once per process and version
def _warn_of_retractions(version: str) -> None:
    logger.warning(
        "[npu_replay] %s retracted a request and computed its routes again. If the weights were changed in "
        "between, they aren't those that sampled its first tokens, and the answer doesn't say so: those of "
        "SGLang 0.5.19 and later do",
        f"SGLang {version}".rstrip(),
    )


# ---- the fields of an answer


def source(version: str = "") -> Source:
    """Return the source of these routes, for error messages, with SGLang's known faults."""
    return Source(engine="SGLang", version=version, faults=FAULTS)


def read(output: Any, version: str) -> SglangAnswer:
    """Read the fields of a meta_info, an answer or a choice: a dict, JSON or an object of OpenAI's client."""
    about = source(version)
    output = server_answers.opened(output, f"SGLang {version}".rstrip(), _FORMS)
    if not isinstance(output, Mapping):
        raise about.unreadable(
            "this is no answer of SGLang's",
            _FORMS,
            f"a list of {len(output)}: give them one by one" if isinstance(output, list) else quoted(output),
        )
    if "choices" in output or "sglext" in output:
        return _of_openai(output, about)
    if "meta_info" not in output:
        return _of_meta_info(output, about)
    answer = _of_meta_info(_mapping(output, "meta_info", about), about)
    return replace(answer, prompt_ids=output.get("prompt_token_ids"), output_ids=_first(output, _OUTPUT))


def _of_meta_info(info: Mapping[Any, Any], source: Source) -> SglangAnswer:
    source = _about(source, info.get("id"), "meta_info.routed_experts")
    key = "num_retractions" if "num_retractions" in info else "total_retractions"  # until 0.5.11
    retractions = _count(info, key, source) or 0
    return SglangAnswer(
        source=source,
        payload=info.get("routed_experts"),
        prompt_tokens=_count(info, "prompt_tokens", source),
        completion_tokens=_count(info, "completion_tokens", source),
        finish=_finish(info.get("finish_reason")),
        retractions=retractions,
        **_weights(info, source),
    )


def _of_openai(response: Mapping[Any, Any], source: Source) -> SglangAnswer:
    """Read an answer of an OpenAI endpoint, where SGLang puts the routes beside the choices."""
    source = _about(source, response.get("id"), "sglext.routed_experts")
    choices = response.get("choices", [])
    if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
        raise source.unreadable("choices aren't a list of choices", _FORMS, quoted(choices))
    if len(choices) > 1:
        raise replace(source, faults=()).error(
            Symptom.MISSING,
            "an OpenAI endpoint of SGLang gives the routes of its first choice only",
            "n=1; /generate; or, from 0.5.13 on, a chat with return_meta_info=True, choice by choice",
            f"{len(choices)} choices",
        )
    choice: Mapping[Any, Any] = choices[0] if choices else {}
    beside = _mapping(response, "sglext", source)
    info = _mapping(choice, "meta_info", source)
    payload = beside.get("routed_experts")
    if payload is None and (envelope := of_choice(choice))[0] is not None:  # a gateway's envelope
        payload, source = envelope[0], replace(source, field=f"choices[0].{envelope[1]}")
    if payload is None:
        payload, field = of_gateway(response, "routed_experts")
        source = replace(source, field=field or source.field)
    if info:
        answer = _of_meta_info(info, source)
        if payload is not None:
            answer = replace(answer, payload=payload, source=replace(answer.source, field=source.field))
    else:
        usage = _mapping(response, "usage", source)
        kind = response.get("object")
        is_completion = isinstance(kind, str) and kind == "text_completion"
        answer = SglangAnswer(
            source=source,
            payload=payload,
            prompt_tokens=_count(usage, "prompt_tokens", source) or None,  # 0 says that the request never ran
            completion_tokens=_count(usage, "completion_tokens", source),
            unbilled=0 if is_completion else _KIMI_STUB,
            finish=_finish(choice.get("finish_reason")),
            **_weights(_mapping(response, "metadata", source), source),
        )
    prompt_ids = choice.get("prompt_token_ids")
    output_ids = _first(choice, _OUTPUT)
    outputs = beside.get("output_ids")
    if output_ids is None:
        output_ids = of_gateway(response, "completion_token_ids")[0]
    if output_ids is None and isinstance(outputs, list) and len(outputs) == 1:  # a list for each choice
        output_ids = outputs[0]
    prompt_ids = beside.get("input_ids") if prompt_ids is None else prompt_ids
    return replace(answer, prompt_ids=prompt_ids, output_ids=output_ids)


def _about(source: Source, request: Any, field: str) -> Source:
    sample = f"request {quoted(request)}" if isinstance(request, (str, int)) else ""
    return replace(source, sample=sample, field=field)


def _mapping(answer: Mapping[Any, Any], key: str, source: Source) -> Mapping[Any, Any]:
    value = answer.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise source.unreadable(f"{key} is no object", "a dict", quoted(value))
    return value


def _count(answer: Mapping[Any, Any], key: str, source: Source) -> int | None:
    value = answer.get(key)
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise source.unreadable(f"{key} is no count", "a whole number", quoted(value))
    return value


def _first(answer: Mapping[Any, Any], keys: tuple[str, ...]) -> Any:
    return next((answer[key] for key in keys if answer.get(key) is not None), None)


def _finish(reason: Any) -> str:
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    return quoted(kind) if isinstance(kind, str) else ""


def _weights(answer: Mapping[Any, Any], source: Source) -> dict[str, Any]:
    """Return the weight fields of an answer: the version, if one made all rows, and the spans."""
    version = answer.get("weight_version")
    spans = answer.get("weight_versions")
    try:
        read = tuple(
            WeightSpan(quoted(span["version"]), int(span["start"]), int(span["end"]))
            for span in (() if spans is None else spans)
        )
        at = [edge for span in read for edge in (span.start, span.end)]
        if at != sorted(at) or any(edge < 0 for edge in at):
            raise ValueError("spans that overlap, or lie in no order")
    except (TypeError, LookupError, ValueError, OverflowError) as error:
        raise source.unreadable(
            "weight_versions isn't a list of spans, one after the other",
            "dicts of version, start and end, from 0 on",
            quoted(spans),
        ) from error
    # «default» is SGLang's placeholder, not a version.
    known = isinstance(version, (str, int)) and version != "default" and len(read) < 2
    return {"weight_version": quoted(version) if known else None, "weight_spans": read}
