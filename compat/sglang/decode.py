"""SGLang: the routes in its answers, as checked RoutedExperts.

What it reads: a meta_info, an answer of /generate or of an OpenAI endpoint, of 0.5.7 and later; no module of
SGLang's. What it offers: `from_sglang`, `engine_arguments` and `request_arguments`; `install` gives a module
that moved in 0.5.12 back its old name, for callers that import it there, and `uninstall` takes it away.

    sglang_answer     which of the forms it is, and what it says
    sglang_rows       the ids, counted and decoded
    sglang_releases   what can be wrong, by release; what it is started with, and can't do
    sglang_old_path   the module's old name
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from npu_replay.compat.sglang.answers import Answer, read, token_ids
from npu_replay.compat.sglang.faults import engine_arguments, request_arguments
from npu_replay.compat.sglang.old_path import install, uninstall
from npu_replay.compat.sglang.rows import TAKEN_BACK, Plan, rows_of
from npu_replay.errors import InvalidRoutes, whole_number
from npu_replay.rollout.admit import Missing, Symptom, admit
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.releases import release, tells_release
from npu_replay.routes.checks import Array
from npu_replay.routes.routed_experts import RoutedExperts

__all__ = ["engine_arguments", "from_sglang", "install", "request_arguments", "uninstall"]

logger = logging.getLogger(__name__)

_STOPPED = ("stop", "tool_calls", "function_call")
"""How a request ends at a stop string, whose tokens the caller may have taken away."""

Tokens: TypeAlias = "Sequence[int] | Array | torch.Tensor"


def from_sglang(
    meta_info: Any,
    model: Any,
    *,
    prompt_token_ids: Tokens | None = None,
    output_ids: Tokens | None = None,
    start_len: int = 0,
    version: str | None = None,
    weight_version: int | str | None = None,
    missing: Missing = "error",
) -> RoutedExperts:
    """The routes of one sequence, out of one answer of SGLang's.

    Args:
        meta_info: the answer's meta_info, or the whole answer: of /generate, of `Engine.generate`, of an
            OpenAI endpoint, or one of its choices; as a dict, as JSON (str or bytes), or as OpenAI's client
            gives it. It isn't changed, and `{"sglext": ...}` or `{"meta_info": ...}` alone will do.
        model: RoutedModel, or what one can be made of: a config, its path, a model.
        prompt_token_ids, output_ids: what the engine was given and what it sampled, [n] integers. Where not
            given they are taken from the answer, if it repeats them.
        start_len: the request's routed_experts_start_len; rows before it have no route.
        version: of the engine, «0.5.12». Without it a fault is named by guess, and what releases before
            0.5.13 ran past the end of a request is an error; with it too, where the answer doesn't count the
            drafts (an OpenAI endpoint's doesn't).
        weight_version: which weights sampled; else the answer's own, if the server was told one.
        missing: "native" leaves rows without a route where the engine has none that fits the log-probs.

    Returns:
        [prompt and output tokens] rows over the model's MoE layers. The last token never ran and has none.

    Raises:
        InvalidRoutes: what is wrong with the answer, and which fault of SGLang's does that.
        ReplayError: `model` says too little, or `version` is no text.
    """
    known = RoutedModel.of(model)
    start_len = whole_number(start_len, "start_len", where="from_sglang")
    release(version or "")  # or an error, for what is no text
    answer = read(meta_info, version if version and tells_release(version, numbers=3) else "")
    tokens = _tokens(answer, prompt_token_ids, output_ids)
    plan = Plan.of(answer, len(tokens.ids), tokens.sampled, tokens.trimmed, start_len)
    routes = admit(
        rows_of(answer, known, plan),
        model=known,
        tokens=tokens.ids,
        source=answer.source,
        start=start_len,
        ended=answer.finish != "abort",
        missing=missing,
        weight_version=_weights(answer) if weight_version is None else weight_version,
    )
    return _sampled_by_them(routes, answer, tokens, missing)


@dataclass(frozen=True)
class _Tokens:
    """The sequence: its ids, how many are the prompt's; how many the engine sampled, and how many of those
    the caller took off the end."""

    ids: Array
    prompt: int
    sampled: int
    trimmed: int


def _tokens(answer: Answer, prompt: Tokens | None, output: Tokens | None) -> _Tokens:
    source = answer.source
    given = [
        theirs if ours is None else token_ids(ours, name, source)
        for name, ours, theirs in (
            ("prompt_token_ids", prompt, answer.prompt_ids),
            ("output_ids", output, answer.output_ids),
        )
    ]
    if given[0] is None or given[1] is None:
        name = "prompt_token_ids" if given[0] is None else "output_ids"
        raise InvalidRoutes(
            f"the answer doesn't repeat the tokens: give {name}", where=str(source.sample or "SGLang")
        )
    ids, sampled = given[0], given[1]
    if answer.prompt_ids is not None and not np.array_equal(ids, answer.prompt_ids):
        raise _other_tokens(answer, "prompt_token_ids", "those of the answer", "others")
    if answer.prompt_tokens is not None and len(ids) - answer.prompt_tokens not in (0, answer.unbilled):
        raise _other_tokens(answer, "prompt_token_ids", answer.prompt_tokens, len(ids))
    ran = len(sampled) if answer.completion_tokens is None else answer.completion_tokens
    whole = answer.output_ids if answer.output_ids is not None and len(answer.output_ids) == ran else None
    if whole is not None and not np.array_equal(whole[: len(sampled)], sampled):
        raise _other_tokens(answer, "output_ids", "those of the answer", "others")
    trimmed = ran - len(sampled)
    if not 0 <= trimmed <= TAKEN_BACK or (trimmed and whole is None and answer.finish not in _STOPPED):
        raise _other_tokens(answer, "output_ids", ran, len(sampled))
    return _Tokens(np.concatenate([ids, sampled]), len(ids), ran, trimmed)


def _other_tokens(answer: Answer, name: str, expected: object, got: object) -> InvalidRoutes:
    where = ", ".join(
        part for part in (f"SGLang {answer.source.version}".rstrip(), answer.source.sample) if part
    )
    return InvalidRoutes(
        f"{name} aren't the tokens that the engine counted",
        where=where,
        expected=expected,
        got=got,
        cause="text that was tokenised again (take output_ids from the answer, and cut the result with "
        "Rollout.truncate), a prompt without the BOS that the engine adds to text, one chunk of a stream, "
        "another sample's tokens, or pictures in the prompt that the engine turned into tokens",
    )


def _weights(answer: Answer) -> str | None:
    """The weights of all rows, where the answer says that they are one."""
    return None if len(answer.weight_spans) > 1 else answer.weight_version


def _sampled_by_them(
    routes: RoutedExperts, answer: Answer, tokens: _Tokens, missing: Missing
) -> RoutedExperts:
    """Keep rows apart from log-probs that other weights made.

    A request that is retracted keeps its tokens and their log-probs, and its routes are computed again. If
    the weights were changed in between, they are those of other log-probs.
    """
    if not answer.retractions:
        return routes
    if not answer.weight_spans:
        _warn_of_retractions(answer.source.version)
    if len(answer.weight_spans) < 2:
        return routes
    newest = answer.weight_spans[-1].start
    if missing == "error":
        raise replace(answer.source, faults=()).error(
            Symptom.STALE_ROWS,
            f"the request was retracted {answer.retractions} times, and the weights changed under it: the "
            f"routes of its first {newest} output tokens were computed again, their log-probs weren't",
            expected="routes that sampled the tokens (missing='native' leaves those rows without a route)",
            got=", ".join(
                f"weights {span.version} for tokens {span.start} to {span.end}"
                for span in answer.weight_spans
            ),
        )
    recorded = routes.recorded.clone()
    first = max(0, tokens.prompt - 1)  # the row that the first output token was sampled from
    recorded[first : min(len(routes), max(0, first + newest))] = False
    ids = routes.ids.masked_fill(~recorded[:, None, None], 0)
    about = routes.fingerprint, routes.weight_version
    return RoutedExperts._adopt(
        ids, routes.layers, routes.num_experts, recorded, *about, vouched=routes.vouched
    )


@functools.lru_cache(maxsize=8)  # once a process
def _warn_of_retractions(version: str) -> None:
    logger.warning(
        "[npu_replay] %s retracted a request and computed its routes again. If the weights were changed in "
        "between, they aren't those that sampled its first tokens, and the answer doesn't say so: those of "
        "SGLang 0.5.19 and later do",
        f"SGLang {version}".rstrip(),
    )
