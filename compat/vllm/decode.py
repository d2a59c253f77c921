"""vLLM: its outputs as RoutedExperts.

Five layouts are in use, told apart by what is there and not by the release:

    0.14, 0.16 to 0.20  [tokens - 1, layers, topk], int32, in-process alone
    0.21                the prompt's rows apart from the completion's, MoE layers only, int16; lists over HTTP
    0.22 to 0.33        [tokens - 1 - start, layers, topk], uint8 up to 256 experts and uint16 above;
                        base64 of .npy over HTTP

The last token that was sampled never has a row: the engine hasn't run it. Releases only choose the words of
an error. Nothing of vLLM is imported or changed.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from npu_replay.compat.vllm.answers import Answer, differ, read
from npu_replay.compat.vllm.releases import DROPPED_AT_STOP_STRING
from npu_replay.errors import ReplayError, whole_number
from npu_replay.rollout.admit import Missing, admit
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.payloads import any_array, token_ids
from npu_replay.rollout.release_rules import Source, Symptom
from npu_replay.rollout.server_answers import Tokens
from npu_replay.routes.checks import Array
from npu_replay.routes.routed_experts import RoutedExperts

_SPARE = 1024
"""So many rows too many are read, for an error that counts them and says what is usual."""


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
    """The checked routes of one request, one RoutedExperts for each of its completions.

    >>> choice = {"prompt_token_ids": [11, 12], "token_ids": [13], "routed_experts": [[[3, 1]], [[2, 0]]]}
    >>> model = npu_replay.RoutedModel(layers=(0,), num_layers=1, num_experts=4, topk=2)
    >>> [routes] = npu_replay.from_vllm({"choices": [choice]}, model)
    >>> routes.ids[:2, 0].tolist()
    [[3, 1], [2, 0]]

    Args:
        output: a RequestOutput; or an answer of /v1/completions, /v1/chat/completions or
            /inference/v1/generate, as a dict, as JSON (str or bytes) or as OpenAI's client gives it.
        model: a RoutedModel, or a Hugging Face config: its path or its folder's, its contents, an object.
        prompt_token_ids: [prompt], where the output hasn't got them; or one such list a completion.
        output_token_ids: the sampled ids, one list a completion, where the output hasn't got them (ask for
            them with return_token_ids), or where tokens were taken off its end. How many were, the output's
            own ids tell, or the `usage` of an answer that has one choice.
        start: the routed_experts_prompt_start that the request was sent with.
        version: vLLM's release, for the words of errors. Where it isn't given an answer over HTTP is asked
            and, where the next isn't either, what is installed, for a RequestOutput. One that tells no
            release («nightly») stands for any.
        vllm_ascend: the same of vllm-ascend.
        weight_version: which weights sampled. Where it isn't given and vLLM says one for all tokens, that.
        missing: "native" leaves rows that are zero in all layers, or another token's, without a route, and so
            a completion whose routes vLLM is known to drop; else they are an error.

    Returns:
        Each of len(prompt) + len(sampled) rows, with the fingerprint of both, in the order of the engine's
        own numbers. The last row has no route, nor have those before `start`, nor has any where an aborted
        request has no rows.

    Raises:
        InvalidRoutes: names the request, the field, and the likeliest fault of that release.
        ReplayError: the model's config doesn't say what has to be known.
    """
    known = RoutedModel.of(model)
    found = read(output, version, vllm_ascend)
    start = whole_number(start, "start", where="from_vllm")
    prompts = _one_each(prompt_token_ids, len(found), "prompt_token_ids")
    outputs = _one_each(output_token_ids, len(found), "output_token_ids")
    if found[0].prompt_payload is not None and len(found) > 1:
        known_ids = [_tokens(*each) for each in zip(found, prompts, outputs, strict=True)]
        ids = [each.ids[: each.prompt] for each in known_ids]
        found = [
            replace(one, another_prompt=differ(ids[0], own)) for one, own in zip(found, ids, strict=True)
        ]
    return [
        routes_of(one, known, prompt, sampled, start, missing, weight_version)
        for one, prompt, sampled in zip(found, prompts, outputs, strict=True)
    ]


def rows_in(answer: Answer, model: RoutedModel | None) -> Array | None:
    """The rows as they came, whatever the model; None where there are none.

    Raises:
        InvalidRoutes: they can't be read.
    """
    given = (answer.prompt_payload, answer.payload)
    parts = [any_array(value, source=answer.source) for value in given if value is not None]
    filled = [part for part in parts if part.size]
    if len({part.shape[1:] for part in filled}) > 1:
        return parts[-1]
    return np.concatenate(filled) if len(filled) > 1 else next(iter(filled + parts), None)


# ---- token ids


def _one_each(given: Any, count: int, name: str) -> list[Any]:
    """What the caller gave for each completion: the same list for all, or one list each."""
    if given is None:
        return [None] * count
    nested = _axes(given) == 2 or (
        isinstance(given, (list, tuple)) and len(given) > 0 and _axes(given[0]) > 0
    )
    if not nested and (name == "prompt_token_ids" or count == 1):
        return [given] * count
    if not nested or len(given) != count:
        raise ReplayError(
            f"{name} doesn't fit the completions",
            where="from_vllm",
            expected=f"{count} lists of token ids",
            got=f"{len(given)} lists" if nested else "one list",
        )
    return list(given)


def _axes(value: Any) -> int:
    """Of an array; a list has one, whatever is in it."""
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return value.ndim
    return int(isinstance(value, (list, tuple)))


def _tokens(one: Answer, prompt: Any, output: Any) -> Tokens:
    """What the caller gave, held against what the answer says; else what the answer says."""
    source = replace(one.source, field="prompt_token_ids")
    ids, theirs = _given(prompt, one.prompt_ids, "prompt", "prompt_token_ids", source)
    if theirs is None and one.prompt_tokens not in (None, len(ids)):
        raise _counted(f"the prompt's token ids given here are {len(ids)}", one.prompt_tokens, source)
    if theirs is not None and not np.array_equal(ids, theirs):
        raise _others(
            "the prompt's token ids given here aren't those that the engine ran", theirs, ids, source
        )
    source = replace(one.source, field=f"{one.place}.token_ids")
    sampled, theirs = _given(output, one.output_ids, "sampled", "output_token_ids", source)
    ran = one.completion_tokens if theirs is None else len(theirs)
    taken_off = 0 if ran is None else ran - len(sampled)
    if theirs is None and taken_off < 0:
        raise _counted(f"the sampled token ids given here are {len(sampled)}", ran, source)
    if theirs is not None and not np.array_equal(sampled, theirs[: len(sampled)]):
        known = len(theirs) or not one.ended  # an aborted stream's last output has none
        if not known or not np.array_equal(sampled[len(sampled) - len(theirs) :], theirs):
            problem = "the sampled token ids given here aren't those that the engine sampled"
            raise _others(problem, theirs, sampled, source, ", or fewer off their end")
        taken_off = 0  # a stream, whose last output has the last ids alone
    return Tokens(np.concatenate([ids, sampled]), len(ids), taken_off)


def _given(ours: Any, theirs: Any, which: str, argument: str, source: Source) -> tuple[Array, Array | None]:
    """The ids to go by, and the engine's own, where it names them."""
    if ours is None and theirs is None:
        raise source.error(
            Symptom.SHAPE,
            f"the answer hasn't got the {which} token ids",
            f"return_token_ids=true in the request, or {argument}= here",
            "neither",
        )
    ids = token_ids(theirs if ours is None else ours, source)
    return ids, None if theirs is None else ids if ours is None else token_ids(theirs, source)


def _others(problem: str, theirs: Array, ours: Array, source: Source, more: str = "") -> Exception:
    expected = f"{len(theirs)} ids, as in the output{more}"
    return source.error(Symptom.SHAPE, problem, expected, f"{len(ours)} others")


def _counted(problem: str, count: int | None, source: Source) -> Exception:
    return source.error(
        Symptom.SHAPE,
        f"{problem}, the engine ran {count}",
        "the ids that it ran, not those of its text tokenised again (return_token_ids=true in the "
        "request puts them into the answer)",
        f"others than the {count} in its usage",
    )


# ---- rows


def routes_of(
    one: Answer,
    model: RoutedModel,
    prompt: Any,
    output: Any,
    start: int,
    missing: Missing = "error",
    weight_version: int | str | None = None,
) -> RoutedExperts:
    """The routes of a completion that was read; else as `from_vllm`."""
    source, tokens = one.source, _tokens(one, prompt, output)
    if one.another_prompt:
        raise replace(source, field="prompt_routed_experts").error(
            Symptom.TOO_FEW_ROWS,
            "the answer is to several prompts, and has the rows of the first alone",
            "one prompt a request",
            "another prompt than the first completion's",
        )
    lacking = _lacks_rows(one, tokens, start)
    dropped = missing == "native" and one.stop_string and DROPPED_AT_STOP_STRING.holds(source.version)
    if lacking and one.ended and not dropped:
        raise _no_rows(one)
    rows = _none(model) if lacking else _rows(one, tokens, model, start)
    if source.never_captures and len(rows) and not rows.any():
        raise source.error(  # with a top-k of 1 too, where the ids alone don't show it
            Symptom.ZEROS, f"all {len(rows)} rows are zeros", "ids of experts", "nothing that was captured"
        )
    return admit(
        rows,
        model=model,
        tokens=tokens.ids,
        source=source,
        start=start,
        ended=one.ended and not lacking,
        surplus=tokens.taken_off,
        missing=missing,
        weight_version=one.weight_version if weight_version is None else weight_version,
    )


def _lacks_rows(one: Answer, tokens: Tokens, start: int) -> bool:
    """Are there none, though the engine ran tokens whose rows they would be? The prompt's, where they are
    kept apart, are no routes of a completion whose own are lost."""
    if one.payload is not None:
        return False
    if one.prompt_payload is not None:
        return tokens.sampled > 1  # the last has no row
    return tokens.prompt + tokens.sampled - 1 > start


def _no_rows(one: Answer) -> Exception:
    if not one.finish and not one.http:
        return one.source.error(
            Symptom.SHAPE,
            "the request isn't finished, and routes come with its last output",
            "the output whose finish_reason is set",
            "finish_reason None",
        )
    return one.source.error(
        Symptom.MISSING,
        "the completion has no routes",
        "an array of expert ids",
        f"None, finished by «{one.finish or None}»",
    )


def _none(model: RoutedModel) -> Array:
    return np.zeros((0, model.num_layers, model.topk), np.uint8)


def _rows(one: Answer, tokens: Tokens, model: RoutedModel, start: int) -> Array:
    """All rows of the completion as one array, [rows, layers, topk], of whichever dtype they came in."""
    source = one.source
    if one.prompt_payload is None:
        most = tokens.prompt + tokens.sampled
        return _none(model) if one.payload is None else _array(one.payload, most, model, source)
    if start:
        raise source.error(Symptom.SHAPE, "this release gives all rows of the prompt", "start=0", start)
    parts = [_prompt_rows(one, tokens, model)]
    if one.payload is not None:
        sampled = max(1, tokens.sampled)
        part = _array(one.payload, sampled, model, source)
        parts.append(part[:-1] if len(part) == sampled else part)  # with MTP it keeps as many as tokens
    filled = [part for part in parts if len(part)]
    if len({part.shape[1:] for part in filled}) > 1:
        raise source.error(
            Symptom.SHAPE,
            "the rows of the prompt and of the completion have other shapes",
            f"[..., {', '.join(map(str, parts[0].shape[1:]))}]",
            list(parts[1].shape),
        )
    rows = np.concatenate(filled) if filled else parts[0]
    # 0.21.0 gives MoE layers the first columns, one after the other, and may have empty ones after them: it
    # overlooks first_k_dense_replace when it counts. vllm-ascend 0.21.0rc1 fills the same columns by label.
    used = len(model.sparse)
    return rows if rows[:, used:].any() else rows[:, :used]


def _prompt_rows(one: Answer, tokens: Tokens, model: RoutedModel) -> Array:
    """The prompt's part, exact: what follows would shift. Without a sample its last token never ran."""
    source = replace(one.source, field="prompt_routed_experts")
    rows = _array(one.prompt_payload, tokens.prompt, model, source)
    if len(rows) != tokens.prompt:
        raise source.error(
            Symptom.SHAPE, "the prompt has another number of rows than tokens", tokens.prompt, len(rows)
        )
    return rows if tokens.sampled else rows[:-1]


def _array(value: Any, most: int, model: RoutedModel, source: Source) -> Array:
    """`value` as an array, of little more than `most` rows where its size could be anything."""
    return any_array(value, source=source, most=(most + _SPARE, model.num_layers, model.topk))
