"""A rollout engine's answer over HTTP, as somebody kept it: whose it is, and each sequence in it, judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from npu_replay.compat.sglang import answers
from npu_replay.compat.sglang import faults as sglang_releases
from npu_replay.compat.sglang.decode import from_sglang
from npu_replay.compat.vllm import faults as vllm_releases
from npu_replay.compat.vllm.answers import Completion, completions
from npu_replay.compat.vllm.decode import from_vllm
from npu_replay.errors import ReplayError
from npu_replay.inspection.judge import (
    FEW_ROWS,
    Known,
    Sample,
    facts_of,
    judge_rows,
    stand_ins,
    view_of_routes,
    view_of_rows,
)
from npu_replay.rollout import payloads
from npu_replay.rollout.admit import Source, Symptom
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.checks import CONSTANT_ROWS, Array
from npu_replay.routes.routed_experts import RoutedExperts

Engine = Literal["vllm", "sglang"]
NAMES: dict[Engine, str] = {"vllm": "vLLM", "sglang": "SGLang"}

_MOST_TOKENS = 1 << 23  # of a sequence whose tokens are only counted
_ONLY_COUNTED = "rows that are another token's: the answer counts its tokens and doesn't name them"
_IDS = ("prompt_token_ids", "token_ids", "response_token_ids", "input_ids", "output_ids")
_WIDEST = (4096, 1024)  # columns and top-k of nested lists whose model isn't known


def source_of(engine: Engine | None, version: str, field: str) -> Source:
    """For messages about a bare array, with the known faults of the engine that made it."""
    if engine is None:
        return Source(engine=field)
    bare = vllm_releases.faults(http=False, stop_string=False)
    faults = bare if engine == "vllm" else sglang_releases.FAULTS
    return Source(engine=NAMES[engine], version=version, field=field, faults=faults)


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


def samples(answer: Any, engine: Engine, version: str, known: Known) -> Iterator[Sample]:
    """Each sequence of an answer, judged.

    Raises:
        InvalidRoutes: it isn't an answer of that engine.
        ReplayError: the ids that were given don't fit it.
    """
    if engine == "sglang":
        several = answer if isinstance(answer, list) else [answer]
        for number, one in enumerate(several):
            yield _of_sglang(one, version, known, number, f"answer {number}" if len(several) > 1 else "")
    else:
        for one in completions(answer):
            yield _of_vllm(answer, one, version, known)


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
    prompt: Array | None, output: Array | None, counts: tuple[Any, Any], rows: Array | None, start: int
) -> _Tokens | None:
    """Of what an answer has of them, or was given; None for nothing."""
    if prompt is not None and output is not None:
        return _Tokens(prompt, output, named=True)
    sizes = [count if ids is None else len(ids) for ids, count in zip((prompt, output), counts, strict=True)]
    if not all(type(size) is int and 0 <= size < _MOST_TOKENS for size in sizes):
        return None
    if start > sum(sizes):
        return None
    ids = np.arange(sum(sizes)) if rows is None else stand_ins(rows, sum(sizes), start)
    return _Tokens(ids[: sizes[0]], ids[sizes[0] :], named=False)


def _without_ids(answer: Mapping[str, Any]) -> dict[str, Any]:
    """An answer that names half of its tokens, without those: the others can only be counted."""
    bare = {key: value for key, value in answer.items() if key not in _IDS}
    if isinstance(bare.get("choices"), list):
        bare["choices"] = [_without_ids(one) if isinstance(one, Mapping) else one for one in bare["choices"]]
    if isinstance(bare.get("sglext"), Mapping):
        bare["sglext"] = _without_ids(bare["sglext"])
    return bare


def _judged(
    name: str, decode: Callable[[], RoutedExperts], rows: Array | None, known: Known, tokens: _Tokens
) -> Sample:
    """By the engine's own decoder, which runs the door's checks."""
    problem: ReplayError | None = None
    view = None if rows is None else view_of_rows(rows, known.model, tokens.ids, known.start)
    facts: tuple[str, ...] = ()
    try:
        routes = decode()
    except ReplayError as error:
        problem = error
    else:
        view = view_of_routes(routes, tokens.ids)
        facts = facts_of(routes) if tokens.named else ()
    unchecked = () if tokens.named else (_ONLY_COUNTED,)
    return Sample(
        name=name,
        view=view,
        problem=problem,
        tokens=len(tokens.prompt) + len(tokens.output),
        rows=None if rows is None else len(rows),
        dtype="" if rows is None else str(rows.dtype),
        nbytes=0 if rows is None else rows.nbytes,
        unchecked=(*unchecked, FEW_ROWS) if rows is not None and len(rows) < CONSTANT_ROWS else unchecked,
        facts=facts,
    )


# ---- vLLM


def _of_vllm(answer: Mapping[str, Any], one: Completion, version: str, known: Known) -> Sample:
    several = len(answer["choices"]) > 1
    name = f"completion {one.number}" if several else ""
    faults = vllm_releases.faults(http=True, stop_string=one.stop_string)
    source = Source(
        engine="vLLM", version=version, sample=one.sample, field=f"{one.place}.routed_experts", faults=faults
    )
    usage = answer.get("usage")
    counted = usage if isinstance(usage, Mapping) and not several else {}
    prompt, output = known.prompt(one.number), known.output(one.number)
    try:
        rows = _rows_of_vllm(one, source)
        tokens = _tokens(
            _ids(one.prompt, "prompt_token_ids", source) if prompt is None else prompt,
            _ids(one.sampled, f"{one.place}.token_ids", source) if output is None else output,
            (counted.get("prompt_tokens"), counted.get("completion_tokens")),
            rows,
            known.start,
        )
    except ReplayError as error:
        return Sample(name=name, problem=error)
    model = known.model
    if model is not None and tokens is not None:
        alone = _alone(answer, one)
        if not tokens.named:
            alone = _without_ids(alone)

        def decode() -> RoutedExperts:
            _refuse_another_prompt(answer, one, model, version)
            return from_vllm(
                alone,
                model,
                prompt_token_ids=tokens.prompt,
                output_token_ids=tokens.output,
                start=known.start,
                version=version,
            )[0]

        return _judged(name, decode, rows, known, tokens)
    if rows is None:
        problem = source.error(Symptom.MISSING, "the completion has no routes", expected="ids", got=None)
        return Sample(name=name, problem=problem)
    ids = None if tokens is None else tokens.ids
    return judge_rows(rows, known, source, tokens=ids, name=name, ended=one.ended)


def _alone(answer: Mapping[str, Any], *some: Completion) -> dict[str, Any]:
    """The answer with some of its completions, under their own numbers. Its usage counts them all."""
    choices = [{**answer["choices"][one.position], "index": one.number} for one in some]
    counts = {} if len(answer["choices"]) == len(some) else {"usage": None}
    return {**answer, "choices": choices, **counts}


def _refuse_another_prompt(
    answer: Mapping[str, Any], one: Completion, model: RoutedModel, version: str
) -> None:
    """Where prompts' rows are kept apart they are the first completion's, which one alone doesn't show."""
    first = completions(answer)[0]
    if one.prompt_rows is not None and first.prompt not in (None, one.prompt):
        from_vllm(_alone(answer, first, one), model, version=version)


def _rows_of_vllm(one: Completion, source: Source) -> Array | None:
    """The rows as they came, whatever the model; None where there are none."""
    parts = [_array(value, source) for value in (one.prompt_rows, one.rows) if value is not None]
    filled = [part for part in parts if part.size]
    if len({part.shape[1:] for part in filled}) > 1:
        return parts[-1]
    return np.concatenate(filled) if len(filled) > 1 else next(iter(filled + parts), None)


def _array(value: Any, source: Source) -> Array:
    """No larger than what is in memory already."""
    if isinstance(value, list):
        return payloads.from_lists(value, source=source, most=(len(value), *_WIDEST))
    size = len(value) if isinstance(value, str) else 0
    return payloads.from_npy(payloads.from_base64(value, source=source, most=size), source=source, most=size)


# ---- SGLang


def _of_sglang(one: Any, version: str, known: Known, number: int, name: str) -> Sample:
    prompt, output = known.prompt(number), known.output(number)
    try:
        answer = answers.read(one, version)
        source = replace(
            answer.source, sample=", ".join(part for part in (answer.source.sample, name) if part)
        )
        prompt = answer.prompt_ids if prompt is None else prompt
        output = answer.output_ids if output is None else output
        if known.model is None:
            raise replace(source, faults=()).error(
                Symptom.SHAPE,
                "SGLang sends ids without their shape",
                expected="the model's config, to know it: --config",
                got="no config",
            )
        rows = _rows_of_sglang(answer.payload, known.model, source)
        counts = (answer.prompt_tokens, answer.completion_tokens)
        tokens = _tokens(prompt, output, counts, rows, known.start)
        if tokens is None:
            raise replace(source, faults=()).error(
                Symptom.SHAPE,
                "the answer neither names nor counts its tokens",
                expected="--prompt-ids and --output-ids",
                got="the routes alone",
            )
    except ReplayError as error:
        return Sample(name=name, problem=error)
    model = known.model

    def decode() -> RoutedExperts:
        return from_sglang(
            one if tokens.named else _without_ids(one),
            model,
            prompt_token_ids=tokens.prompt,
            output_ids=tokens.output,
            start_len=known.start,
            version=version or None,
        )

    return _judged(name, decode, rows, known, tokens)


def _rows_of_sglang(payload: Any, model: RoutedModel, source: Source) -> Array | None:
    """As many whole rows as there are; None where nothing can be read."""
    if not isinstance(payload, str):
        return None
    try:
        data = payloads.from_base64(payload, source=source, most=len(payload))
    except ReplayError:
        return None  # the decoder says so
    flat = np.frombuffer(data[: len(data) // 4 * 4], "<i4")
    row = model.num_layers * model.topk
    return flat[: len(flat) // row * row].reshape(-1, model.num_layers, model.topk)


def _ids(value: Any, name: str, source: Source) -> Array | None:
    return None if value is None else answers.token_ids(value, name, source)
