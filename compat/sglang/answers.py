"""One answer of SGLang's, whichever endpoint gave it: where its routes lie, and what it says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from npu_replay.compat.sglang.releases import FAULTS
from npu_replay.rollout import server_answers
from npu_replay.rollout.payloads import named, token_ids
from npu_replay.rollout.release_rules import Source, Symptom
from npu_replay.routes.checks import Array

_FORMS = "meta_info, or the whole answer of /generate or of an OpenAI endpoint"
_OUTPUT = ("output_ids", "token_ids", "response_token_ids")  # by endpoint
_DRAFTS = (  # verifications, drafts accepted and drafts proposed: by their names until 0.5.10, 0.5.11, later
    ("spec_verify_ct",),
    ("spec_accept_token_num", "spec_accepted_drafts", "spec_num_correct_drafts"),
    ("spec_draft_token_num", "spec_proposed_drafts", "spec_num_proposed_drafts"),
)
_KIMI_STUB = 3
"""0.5.17 and later leave so many tokens of a Kimi-K3 chat's prompt out of its usage."""
_SHORT = 80  # characters of somebody else's text in a message


@dataclass(frozen=True)
class WeightSpan:
    """Output tokens from `start` to before `end` were sampled under the weights `version`."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Answer(server_answers.Answer):
    """One answer of SGLang's. Its token ids are [n] int64; a weight version is that at the end.

    Attributes:
        unbilled: so many tokens of the prompt may be missing in `prompt_tokens`.
        drafted_past: so many tokens were drafted and accepted behind the end, by the engine's counts of
            speculation; they may have been run.
        weight_spans: the weights that sampled each part of the output, in SGLang 0.5.19 and later.
        retractions: how often the request was put back and computed again.
    """

    unbilled: int = 0
    drafted_past: int = 0
    weight_spans: tuple[WeightSpan, ...] = ()
    retractions: int = 0


def source(version: str = "") -> Source:
    """Whose routes these are, for messages, with SGLang's known faults."""
    return Source(engine="SGLang", version=version, faults=FAULTS)


def read(found: Any, version: str) -> Answer:
    """Find the fields in an answer: a meta_info, an answer of /generate, a choice or an answer of OpenAI's;
    a dict, JSON, or an object of OpenAI's client.

    Raises:
        InvalidRoutes: it is something else, or a field of it is.
    """
    about = source(version)
    found = server_answers.opened(found, f"SGLang {version}".rstrip(), _FORMS)
    if not isinstance(found, Mapping):
        got = f"a list of {len(found)}: give them one by one" if isinstance(found, list) else named(found)
        raise about.unreadable("this is no answer of SGLang's", _FORMS, got)
    if "choices" in found or "sglext" in found:
        return _of_openai(found, about)
    if "meta_info" in found:
        info = _mapping(found, "meta_info", about)
        return replace(
            _of_meta_info(info, about),
            prompt_ids=_ids(found, "prompt_token_ids", about),
            output_ids=_first(found, _OUTPUT, about),
        )
    return _of_meta_info(found, about)


def _of_meta_info(info: Mapping[Any, Any], source: Source) -> Answer:
    source = _about(source, info.get("id"), "meta_info.routed_experts")
    key = "num_retractions" if "num_retractions" in info else "total_retractions"  # until 0.5.11
    retractions = _count(info, key, source) or 0
    return Answer(
        source=source,
        payload=info.get("routed_experts"),
        prompt_tokens=_count(info, "prompt_tokens", source),
        completion_tokens=_count(info, "completion_tokens", source),
        drafted_past=0 if retractions else _drafted_past(info, source),  # a retraction runs tokens again
        finish=_finish(info.get("finish_reason")),
        weight_version=_weights(info),
        weight_spans=_spans(info, source),
        retractions=retractions,
    )


def _drafted_past(info: Mapping[Any, Any], source: Source) -> int:
    """What speculation sampled, less what counts: the prefill's token, one a verification, and the drafts
    that were accepted. The last verification accepts what lies behind the end, too."""
    rounds, accepted, proposed = (
        next((found for key in keys if (found := _count(info, key, source)) is not None), None)
        for keys in _DRAFTS
    )
    counted = _count(info, "completion_tokens", source)
    if not rounds or accepted is None or proposed is None or counted is None:
        return 0
    past = 1 + rounds + accepted - counted
    return past if 0 < past <= proposed // rounds else 0


def _of_openai(found: Mapping[Any, Any], source: Source) -> Answer:
    """SGLang puts the routes beside the choices, so that they stay out of the message."""
    source = _about(source, found.get("id"), "sglext.routed_experts")
    choices = found.get("choices", [])
    if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
        raise source.unreadable("choices aren't a list of choices", _FORMS, named(choices))
    if len(choices) > 1:
        raise replace(source, faults=()).error(
            Symptom.MISSING,
            "an OpenAI endpoint of SGLang gives the routes of its first choice only",
            "n=1; or /generate, one answer at a time; or, from 0.5.13 on, a chat with "
            "return_meta_info=True and choices[i] one by one",
            f"{len(choices)} choices",
        )
    choice: Mapping[Any, Any] = choices[0] if choices else {}
    beside, info = _mapping(found, "sglext", source), _mapping(choice, "meta_info", source)
    payload = beside.get("routed_experts")
    if info:
        answer = _of_meta_info(info, source)
        if payload is not None:
            answer = replace(answer, payload=payload, source=replace(answer.source, field=source.field))
    else:
        said, usage = _mapping(found, "metadata", source), _mapping(found, "usage", source)
        answer = Answer(
            source=source,
            payload=payload,
            prompt_tokens=_count(usage, "prompt_tokens", source) or None,  # 0: it never ran
            completion_tokens=_count(usage, "completion_tokens", source),
            unbilled=0 if str(found.get("object")) == "text_completion" else _KIMI_STUB,
            finish=_finish(choice.get("finish_reason")),
            weight_version=_weights(said),
            weight_spans=_spans(said, source),
        )
    prompt_ids, output_ids = _ids(choice, "prompt_token_ids", source), _first(choice, _OUTPUT, source)
    outputs = beside.get("output_ids")  # a list for each choice
    if output_ids is None and isinstance(outputs, list) and len(outputs) == 1:
        output_ids = token_ids(outputs[0], replace(source, field="sglext.output_ids"))
    if prompt_ids is None:
        prompt_ids = _ids(beside, "input_ids", source)
    return replace(answer, prompt_ids=prompt_ids, output_ids=output_ids)


def _about(source: Source, request: Any, field: str) -> Source:
    sample = f"request {str(request)[:_SHORT]}" if isinstance(request, (str, int)) else ""
    return replace(source, sample=sample, field=field)


def _mapping(found: Mapping[Any, Any], key: str, source: Source) -> Mapping[Any, Any]:
    value = found.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise source.unreadable(f"{key} is no object", "a dict", named(value))
    return value


def _count(found: Mapping[Any, Any], key: str, source: Source) -> int | None:
    value = found.get(key)
    if value is None:
        return None
    if type(value) is not int or value < 0:
        raise source.unreadable(f"{key} is no count", "a whole number", str(value)[:_SHORT])
    return value


def _first(found: Mapping[Any, Any], keys: tuple[str, ...], source: Source) -> Array | None:
    return next((ids for key in keys if (ids := _ids(found, key, source)) is not None), None)


def _ids(found: Mapping[Any, Any], key: str, source: Source) -> Array | None:
    return None if found.get(key) is None else token_ids(found[key], replace(source, field=key))


def _finish(reason: Any) -> str:
    kind = reason.get("type") if isinstance(reason, Mapping) else reason
    return kind if isinstance(kind, str) else ""


def _weights(found: Mapping[Any, Any]) -> str | None:
    version = found.get("weight_version")  # SGLang's own «default» says nothing
    known = isinstance(version, (str, int)) and version != "default"
    return str(version)[:_SHORT] if known else None


def _spans(found: Mapping[Any, Any], source: Source) -> tuple[WeightSpan, ...]:
    spans = found.get("weight_versions")
    if spans is None:
        return ()
    try:
        found_spans = tuple(
            WeightSpan(str(span["version"])[:_SHORT], int(span["start"]), int(span["end"])) for span in spans
        )
        at = [edge for span in found_spans for edge in (span.start, span.end)]
        if at == sorted(at) and all(edge >= 0 for edge in at):
            return found_spans
        raise ValueError("spans that overlap, or lie in no order")
    except (TypeError, LookupError, ValueError, OverflowError) as error:
        raise source.unreadable(
            "weight_versions isn't a list of spans, one after the other",
            "dicts of version, start and end, from 0 on",
            str(spans)[:_SHORT],
        ) from error
