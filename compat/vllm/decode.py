"""vLLM: its outputs as RoutedExperts, and the arguments with which it makes them.

Five layouts are in use, told apart by what is there and not by the release:

    0.14, 0.16 to 0.20  [tokens - 1, layers, topk], int32, in-process alone
    0.21                the prompt's rows apart from the completion's, MoE layers only, int16; lists over HTTP
    0.22 to 0.33        [tokens - 1 - start, layers, topk], uint8 up to 256 experts and uint16 above;
                        base64 of .npy over HTTP

The last token that was sampled never has a row: the engine hasn't run it. Releases only choose the words of
an error. Nothing of vLLM is imported or changed.

    vllm_completions  what it hands out, taken apart
    vllm_releases     what can be wrong with it, by release
    vllm_arguments    what it is started with, and what a release can't do
    vllm_ascend       the same on Ascend, by the plugin's release

Probes: `capability`. Offers: `from_vllm`, `engine_arguments`. Nothing to undo.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from npu_replay.compat import probe
from npu_replay.compat.vllm import faults as releases
from npu_replay.compat.vllm.answers import Completion, completions
from npu_replay.compat.vllm.launch import capability, engine_arguments
from npu_replay.errors import ReplayError, whole_number
from npu_replay.rollout import payloads
from npu_replay.rollout.admit import Missing, Source, Symptom, admit
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.releases import release
from npu_replay.routes.checks import Array, is_ids
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.routes.token_ids import as_token_ids

__all__ = ["capability", "engine_arguments", "from_vllm"]

_SPARE = 1024
"""So many rows too many are read, for an error that counts them and says what is usual."""

_WIDEST = 4  # bytes an id: int32
_HEADER = 4096  # bytes of an .npy before its ids, at most


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
    found = completions(output)
    start = whole_number(start, "start", where="from_vllm")
    captured = any(one.rows is not None for one in found)
    asked = _Asked(start, missing, weight_version, *_releases(found[0], version, vllm_ascend), captured)
    prompts = _one_each(prompt_token_ids, len(found), "prompt_token_ids")
    outputs = _one_each(output_token_ids, len(found), "output_token_ids")
    tokens = [
        _tokens(one, prompt, sampled, asked.source(one))
        for one, prompt, sampled in zip(found, prompts, outputs, strict=True)
    ]
    _refuse_shared_prompt_rows(found, tokens, asked)
    return [_routes(one, at, known, asked) for one, at in zip(found, tokens, strict=True)]


@dataclass(frozen=True)
class _Asked:
    """What the caller of `from_vllm` said, for all completions; and whether any of them has routes."""

    start: int
    missing: Missing
    weight_version: int | str | None
    version: str
    vllm_ascend: str
    captured: bool

    def source(self, one: Completion, field: str = "") -> Source:
        return Source(
            engine="vLLM",
            version=self.version,
            device=releases.device_of(self.version, self.vllm_ascend),
            sample=one.sample,
            field=field or f"{one.place}.routed_experts",
            faults=releases.faults(
                http=one.http,
                stop_string=one.stop_string,
                alone=self.captured and one.rows is None,
                vllm_ascend=self.vllm_ascend,
            ),
        )


@dataclass(frozen=True)
class _Tokens:
    """The ids of one completion, [prompt] and [sampled], and how many the caller took off its end."""

    prompt: Array
    sampled: Array
    taken_off: int

    def __len__(self) -> int:
        return len(self.prompt) + len(self.sampled)

    @property
    def generated_rows(self) -> int:
        """How many rows the engine has after the prompt's: the last token that it sampled has none."""
        return max(0, len(self.sampled) + self.taken_off - 1)


def _releases(first: Completion, version: str | None, vllm_ascend: str | None) -> tuple[str, str]:
    """Those that were said; else the answer's own, or what is installed, if the output is of this process."""
    for said in (version, vllm_ascend):
        release(said or "")  # or an error, for what is no text
    if first.http or version is not None or vllm_ascend is not None:
        return first.version if version is None else version, vllm_ascend or ""
    return probe.installed("vllm"), probe.installed("vllm-ascend")


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


def _tokens(one: Completion, prompt: Any, sampled: Any, source: Source) -> _Tokens:
    return _Tokens(
        _prompt(one, prompt, replace(source, field="prompt_token_ids")),
        *_sampled(one, sampled, replace(source, field=f"{one.place}.token_ids")),
    )


def _prompt(one: Completion, given: Any, source: Source) -> Array:
    if given is None and one.prompt is None:
        raise source.error(
            Symptom.SHAPE,
            "the answer hasn't got the prompt's token ids",
            expected="return_token_ids=true in the request, or prompt_token_ids= here",
            got="neither",
        )
    ids = _ids(one.prompt if given is None else given, source)
    if one.prompt is None and one.prompt_count not in (None, len(ids)):
        raise _counted(f"the prompt's token ids given here are {len(ids)}", one.prompt_count, source)
    if given is not None and one.prompt is not None and not np.array_equal(ids, _ids(one.prompt, source)):
        raise source.error(
            Symptom.SHAPE,
            "the prompt's token ids given here aren't those that the engine ran",
            expected=f"{len(one.prompt)} ids, as in the output",
            got=f"{len(ids)} others",
        )
    return ids


def _sampled(one: Completion, given: Any, source: Source) -> tuple[Array, int]:
    """The sampled ids, and how many of the engine's own come after them."""
    if given is None and one.sampled is None:
        raise source.error(
            Symptom.SHAPE,
            "the answer hasn't got the sampled token ids",
            expected="return_token_ids=true in the request, or output_token_ids= here",
            got="neither",
        )
    ids = _ids(one.sampled if given is None else given, source)
    if given is None:
        return ids, 0
    if one.sampled is None:
        return ids, _taken_off(ids, one.sampled_count, source)
    engines = _ids(one.sampled, source)
    if np.array_equal(ids, engines[: len(ids)]):
        return ids, len(engines) - len(ids)
    if len(engines) and np.array_equal(ids[-len(engines) :], engines):
        return ids, 0  # a stream, whose last output has the last ids alone
    raise source.error(
        Symptom.SHAPE,
        "the sampled token ids given here aren't those that the engine sampled",
        expected=f"{len(engines)} ids, as in the output, or fewer off their end",
        got=f"{len(ids)} others",
    )


def _taken_off(ids: Array, count: int | None, source: Source) -> int:
    """How many more the engine sampled, where the answer counts them."""
    more = 0 if count is None else count - len(ids)
    if more < 0:
        raise _counted(f"the sampled token ids given here are {len(ids)}", count, source)
    return more


def _counted(problem: str, count: int | None, source: Source) -> Exception:
    return source.error(
        Symptom.SHAPE,
        f"{problem}, the engine ran {count}",
        expected="the ids that it ran, not those of its text tokenised again (return_token_ids=true in the "
        "request puts them into the answer)",
        got=f"others than the {count} in its usage",
    )


def _ids(value: Any, source: Source) -> Array:
    ids = as_token_ids(value)
    if ids is not None and not (ids < 0).any():
        return ids
    raise source.error(
        Symptom.SHAPE,
        "these aren't token ids",
        expected="a flat list of integers from 0 on",
        got=_named(value) if ids is None else f"{ids.min()} to {ids.max()}",
    )


def _named(value: Any) -> str:
    if isinstance(value, torch.Tensor) and value.layout is not torch.strided:  # as its dtype may be right
        return f"{value.layout} of {value.dtype} {list(value.shape)}"
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return f"{value.dtype} {list(value.shape)}"
    return f"{type(value).__name__} {str(value)[:80]}"


# ---- rows


def _routes(one: Completion, tokens: _Tokens, model: RoutedModel, asked: _Asked) -> RoutedExperts:
    source = asked.source(one)
    lacking = _lacks_rows(one, tokens, asked.start)
    if lacking and one.ended and not _are_known_to_be_dropped(one, asked):
        raise _no_rows(one, source)
    rows = _none(model) if lacking else _rows(one, tokens, model, asked)
    if _never_captured(rows, model, asked):
        raise source.error(
            Symptom.ZEROS,
            f"all {len(rows)} rows are zeros",
            expected="ids of experts",
            got="nothing that was captured",
        )
    return admit(
        rows,
        model=model,
        tokens=np.concatenate([tokens.prompt, tokens.sampled]),
        source=source,
        start=asked.start,
        ended=one.ended and not lacking,
        surplus=tokens.taken_off,
        missing=asked.missing,
        weight_version=asked.weight_version if asked.weight_version is not None else _weights(one),
    )


def _never_captured(rows: Array, model: RoutedModel, asked: _Asked) -> bool:
    """Zeros throughout, which no caller can mean: missing="native" is for rows that are lost now and then. Of
    a release that never captures they are wrong with a top-k of 1, too."""
    suspect = asked.missing == "native" and model.topk > 1
    suspect = suspect or releases.never_captures(asked.version, asked.vllm_ascend)
    return suspect and len(rows) > 0 and not rows.any()


def _lacks_rows(one: Completion, tokens: _Tokens, start: int) -> bool:
    """Are there none, though the engine ran tokens whose rows they would be? The prompt's, where they are
    kept apart, are no routes of a completion whose own are lost."""
    if one.rows is not None:
        return False
    if one.prompt_rows is not None:
        return tokens.generated_rows > 0
    return len(tokens) + tokens.taken_off - 1 > start


def _are_known_to_be_dropped(one: Completion, asked: _Asked) -> bool:
    return asked.missing == "native" and one.stop_string and releases.drops_at_stop_string(asked.version)


def _no_rows(one: Completion, source: Source) -> Exception:
    if one.finish_reason is None and not one.http:
        return source.error(
            Symptom.SHAPE,
            "the request isn't finished, and routes come with its last output",
            expected="the output whose finish_reason is set",
            got="finish_reason None",
        )
    return source.error(
        Symptom.MISSING,
        "the completion has no routes",
        expected="an array of expert ids",
        got=f"None, finished by «{one.finish_reason}»",
    )


def _none(model: RoutedModel) -> Array:
    return np.zeros((0, model.num_layers, model.topk), np.uint8)


def _rows(one: Completion, tokens: _Tokens, model: RoutedModel, asked: _Asked) -> Array:
    """All rows of the completion as one array, [rows, layers, topk], of whichever dtype they came in."""
    source = asked.source(one)
    if one.prompt_rows is None:
        if one.rows is None:
            return _none(model)
        return _array(one.rows, len(tokens) + tokens.taken_off, model, source)
    if asked.start:
        raise source.error(
            Symptom.SHAPE, "this release gives all rows of the prompt", expected="start=0", got=asked.start
        )
    parts = [_prompt_rows(one, tokens, model, asked.source(one, "prompt_routed_experts"))]
    if one.rows is not None:
        generated = _array(one.rows, tokens.generated_rows + 1, model, source)
        if len(generated) == tokens.generated_rows + 1:  # with MTP it keeps as many as tokens
            generated = generated[:-1]
        parts.append(generated)
    return _filled_columns(_joined(parts, source), model)


def _prompt_rows(one: Completion, tokens: _Tokens, model: RoutedModel, source: Source) -> Array:
    """The prompt's part, exact: what follows would shift. Without a sample its last token never ran."""
    rows = _array(one.prompt_rows, len(tokens.prompt), model, source)
    if len(rows) != len(tokens.prompt):
        raise source.error(
            Symptom.SHAPE,
            "the prompt has another number of rows than tokens",
            expected=len(tokens.prompt),
            got=len(rows),
        )
    return rows if len(tokens.sampled) + tokens.taken_off else rows[:-1]


def _array(value: Any, most: int, model: RoutedModel, source: Source) -> Array:
    """`value` as an array, of little more than `most` rows where its size could be anything."""
    most += _SPARE
    if isinstance(value, torch.Tensor):
        with suppress(TypeError, RuntimeError):  # sparse, quantised, of a dtype that numpy hasn't: no ids
            value = value.detach().cpu().numpy()
    if isinstance(value, (np.ndarray, torch.Tensor)):
        return _three_axes(value, source)
    if isinstance(value, (str, bytes, bytearray)):
        room = most * model.num_layers * model.topk * _WIDEST
        text = value if isinstance(value, str) else bytes(value)
        data = payloads.from_base64(text, source=source, most=room + _HEADER)
        return _three_axes(payloads.from_npy(data, source=source, most=room), source)
    return payloads.from_lists(value, source=source, most=(most, model.num_layers, model.topk))


def _three_axes(rows: Array | torch.Tensor, source: Source) -> Array:
    if is_ids(rows):
        return rows
    raise source.error(
        Symptom.SHAPE,
        "this isn't an array of expert ids",
        expected="integers, [tokens, layers, topk]",
        got=_named(rows),
    )


def _joined(parts: list[Array], source: Source) -> Array:
    filled = [part for part in parts if len(part)]
    if len({part.shape[1:] for part in filled}) > 1:
        raise source.error(
            Symptom.SHAPE,
            "the rows of the prompt and of the completion have other shapes",
            expected=f"[..., {', '.join(map(str, parts[0].shape[1:]))}]",
            got=list(parts[1].shape),
        )
    return np.concatenate(filled) if filled else parts[0]


def _filled_columns(rows: Array, model: RoutedModel) -> Array:
    """0.21.0 gives MoE layers the first columns, one after the other, and may have empty ones after them: it
    overlooks first_k_dense_replace when it counts. vllm-ascend 0.21.0rc1 fills the same columns by label."""
    used = len(model.sparse)
    return rows if rows[:, used:].any() else rows[:, :used]


def _weights(one: Completion) -> str | None:
    """The engine's own weight version, where it names one for all tokens."""
    spans = one.weight_versions if isinstance(one.weight_versions, (list, tuple)) else ()
    named = [
        span.get("version") if isinstance(span, Mapping) else getattr(span, "version", None) for span in spans
    ]
    if not named or not all(isinstance(version, str) for version in named):
        return None
    return str(named[0]) if len(set(named)) == 1 else None


def _refuse_shared_prompt_rows(found: list[Completion], tokens: list[_Tokens], asked: _Asked) -> None:
    """0.21.0 answers several prompts at once with the rows of the first alone."""
    for one, at in zip(found, tokens, strict=True):
        if one.prompt_rows is not None and not np.array_equal(at.prompt, tokens[0].prompt):
            raise asked.source(one, "prompt_routed_experts").error(
                Symptom.TOO_FEW_ROWS,
                "the answer is to several prompts, and has the rows of the first alone",
                expected="one prompt a request",
                got="another prompt than the first completion's",
            )
