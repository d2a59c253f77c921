"""A rollout engine's answer over HTTP, as somebody kept it: whose it is, and each sequence in it, judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

import numpy as np

from npu_replay.compat.sglang import answers as sglang_answers
from npu_replay.compat.sglang import decode as sglang
from npu_replay.compat.vllm import answers as vllm_answers
from npu_replay.compat.vllm import decode as vllm
from npu_replay.errors import ReplayError
from npu_replay.inspection.judge import (
    FEW_ROWS,
    Known,
    Verdict,
    facts_of,
    judge_rows,
    stand_ins,
    view_of_routes,
    view_of_rows,
)
from npu_replay.rollout.payloads import token_ids
from npu_replay.rollout.release_rules import Source, Symptom
from npu_replay.routes.checks import CONSTANT_ROWS, Array

Engine = Literal["vllm", "sglang"]
NAMES: dict[Engine, str] = {"vllm": "vLLM", "sglang": "SGLang"}
_DECODERS: dict[Engine, ModuleType] = {"vllm": vllm, "sglang": sglang}

_MOST_TOKENS = 1 << 23  # of a sequence whose tokens are only counted
_ONLY_COUNTED = "rows that are another token's: the answer counts its tokens and doesn't name them"


def source_of(engine: Engine | None, version: str, field: str) -> Source:
    """For messages about a bare array, with the known faults of the engine that made it."""
    if engine is None:
        return Source(engine=field)
    source = vllm_answers.source(version) if engine == "vllm" else sglang_answers.source(version)
    return replace(source, field=field)


def whose(answer: Any) -> Engine | None:
    """The engine that gave this answer, by the names of its fields; None if it can't be told."""
    if isinstance(answer, list):
        return "sglang" if answer and all(whose(one) == "sglang" for one in answer) else None
    if not isinstance(answer, Mapping):
        return None
    listed = answer.get("choices")
    choices = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    if "prompt_routed_experts" in answer or any("routed_experts" in one for one in choices):
        return "vllm"
    fields = {*answer, *(field for one in choices for field in one)}
    if fields & {"sglext", "meta_info", "matched_stop", "routed_experts"}:
        return "sglang"
    return "vllm" if fields & {"stop_reason", "prompt_logprobs", "kv_transfer_params"} else None


def samples(answer: Any, engine: Engine, version: str, known: Known) -> Iterator[Verdict]:
    """Each sequence of an answer, judged by the engine's own decoder.

    Raises:
        InvalidRoutes: it isn't an answer of that engine.
        ReplayError: the ids that were given don't fit it.
    """
    if engine == "vllm":
        found = vllm_answers.read(answer, version)
        for one in found:
            yield _judged(one, vllm, known, one.number, f"completion {one.number}" if len(found) > 1 else "")
        return
    several = answer if isinstance(answer, list) else [answer]
    for number, one in enumerate(several):
        name = f"answer {number}" if len(several) > 1 else ""
        try:
            read = sglang_answers.read(one, version)
        except ReplayError as error:
            yield Verdict.of(error, name=name)
            continue
        sample = ", ".join(part for part in (read.source.sample, name) if part)
        yield _judged(replace(read, source=replace(read.source, sample=sample)), sglang, known, number, name)


@dataclass(frozen=True, eq=False)
class _Tokens:
    """A sequence's ids; or, where the answer only counts them, as many others."""

    prompt: Array
    output: Array
    named: bool

    @property
    def ids(self) -> Array | None:
        return np.concatenate([self.prompt, self.output]) if self.named else None


def _tokens(
    one: Any, given: tuple[Array | None, Array | None], rows: Array | None, start: int
) -> _Tokens | None:
    """What was given, or an answer has; None where it doesn't even count them."""
    prompt, output = (
        None if theirs is None and ours is None else token_ids(theirs if ours is None else ours, one.source)
        for ours, theirs in zip(given, (one.prompt_ids, one.output_ids), strict=True)
    )
    if prompt is not None and output is not None:
        return _Tokens(prompt, output, named=True)
    first = one.prompt_tokens if prompt is None else len(prompt)
    count = one.completion_tokens if output is None else len(output)
    if first is None or count is None or max(first, count) >= _MOST_TOKENS or start > first + count:
        return None
    ids = np.arange(first + count) if rows is None else stand_ins(rows, first + count, start)
    return _Tokens(ids[:first], ids[first:], named=False)


def _judged(one: Any, decoder: ModuleType, known: Known, number: int, name: str) -> Verdict:
    """One sequence.

    Args:
        one: the engine's own `answers.Answer`.
        decoder: the engine's `decode`.
    """
    given, model = known.given(number), known.model
    try:
        rows = decoder.rows_in(one, model)
        tokens = _tokens(one, given, rows, known.start)
        if tokens is None and decoder is sglang:
            raise replace(one.source, faults=()).error(
                Symptom.SHAPE,
                "the answer neither names nor counts its tokens",
                expected="--prompt-ids and --output-ids",
                got="the routes alone",
            )
        if rows is None and (tokens is None or model is None):
            raise one.source.error(Symptom.MISSING, "there are no routes", expected="ids", got=None)
    except ReplayError as error:
        return Verdict.of(error, name=name)
    ids = None if tokens is None else tokens.ids
    if tokens is None or model is None:
        return judge_rows(rows, known, one.source, tokens=ids, name=name, ended=one.ended)
    if not tokens.named:
        one = replace(one, prompt_ids=None, output_ids=None)
    problem: ReplayError | None = None
    facts: tuple[str, ...] = ()
    view = None if rows is None else view_of_rows(rows, model, ids, known.start)
    try:
        routes = decoder.routes_of(one, model, tokens.prompt, tokens.output, known.start)
        view = view_of_routes(routes, ids)
        facts = facts_of(routes) if tokens.named else ()
    except ReplayError as error:
        problem = error
    unchecked = [] if tokens.named else [_ONLY_COUNTED]
    if rows is not None and len(rows) < CONSTANT_ROWS:
        unchecked.append(FEW_ROWS)
    return Verdict.of(
        problem,
        ids=rows,
        view=view,
        name=name,
        tokens=len(tokens.prompt) + len(tokens.output),
        facts=facts,
        unchecked=tuple(unchecked),
    )
