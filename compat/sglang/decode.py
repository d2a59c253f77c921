"""SGLang: the routes in its answers, as checked RoutedExperts.

The ids come flat and say nothing of their shape: [rows, decoder layers, top-k], int32, with a row for each
token but the last. Only their count can tell a wrong model, a missing row or another request's routes, so it
is held against what this release sends before anything is decoded. Nothing of SGLang is imported or changed.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from npu_replay.compat.sglang.answers import Answer, read
from npu_replay.compat.sglang.releases import HONOURS_START, STOPS_EXACTLY
from npu_replay.errors import InvalidRoutes, ReplayError, whole_number
from npu_replay.rollout.admit import Missing, admit
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.payloads import TokenIds, as_numpy, from_base64, token_ids
from npu_replay.rollout.release_rules import Symptom, release, tells_release
from npu_replay.rollout.server_answers import Tokens
from npu_replay.routes.checks import Array
from npu_replay.routes.routed_experts import RoutedExperts

logger = logging.getLogger(__name__)

_TAKEN_BACK = 64
"""So many of the engine's tokens at most may the caller have taken off the end: a stop string's."""
_STOPPED = ("stop", "tool_calls", "function_call")
"""How a request ends at a stop string, whose tokens the caller may have taken away."""


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
    """The routes of one sequence, out of one answer of SGLang's.

    >>> import base64
    >>> ids = np.array([[[3, 1]], [[2, 0]]], "<i4")
    >>> answer = {"meta_info": {"routed_experts": base64.b64encode(ids.tobytes()).decode()}}
    >>> model = npu_replay.RoutedModel(layers=(0,), num_layers=1, num_experts=4, topk=2)
    >>> npu_replay.from_sglang(answer, model, prompt_token_ids=[11, 12], output_ids=[13]).ids[:2, 0].tolist()
    [[3, 1], [2, 0]]

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
    start = whole_number(start_len, "start_len", where="from_sglang")
    release(version or "")  # or an error, for what is no text
    answer = read(meta_info, version if version and tells_release(version, numbers=3) else "")
    return routes_of(answer, known, prompt_token_ids, output_ids, start, missing, weight_version)


def rows_in(answer: Answer, model: RoutedModel | None) -> Array | None:
    """As many whole rows of the model's as there are; None where nothing can be read.

    Raises:
        InvalidRoutes: there is no model.
    """
    if model is None:
        raise replace(answer.source, faults=()).error(
            Symptom.SHAPE,
            "SGLang sends ids without their shape",
            "the model's config, to know it: --config",
            "no config",
        )
    if not isinstance(answer.payload, str):
        return None
    try:
        data = from_base64(answer.payload, source=answer.source, most=len(answer.payload))
    except ReplayError:
        return None  # the decoder says so
    flat = np.frombuffer(data[: len(data) // 4 * 4], "<i4")
    row = model.num_layers * model.topk
    return flat[: len(flat) // row * row].reshape(-1, model.num_layers, model.topk)


def routes_of(
    answer: Answer,
    model: RoutedModel,
    prompt: TokenIds | None,
    output: TokenIds | None,
    start: int,
    missing: Missing = "error",
    weight_version: int | str | None = None,
) -> RoutedExperts:
    """The routes of an answer that was read; else as `from_sglang`."""
    tokens = _tokens(answer, prompt, output)
    weights = None if len(answer.weight_spans) > 1 else answer.weight_version  # of all rows
    routes = admit(
        _Rows.of(answer, model, tokens, start).read(),
        model=model,
        tokens=tokens.ids,
        source=answer.source,
        start=start,
        ended=answer.ended,
        missing=missing,
        weight_version=weights if weight_version is None else weight_version,
    )
    return _sampled_by_them(routes, answer, tokens, missing)


def _tokens(answer: Answer, prompt: TokenIds | None, output: TokenIds | None) -> Tokens:
    given = {"prompt_token_ids": (prompt, answer.prompt_ids), "output_ids": (output, answer.output_ids)}
    found: list[Array] = []
    for name, (ours, theirs) in given.items():
        if ours is None and theirs is None:
            problem = f"the answer doesn't repeat the tokens: give {name}"
            raise InvalidRoutes(problem, where=answer.source.sample or "SGLang")
        found.append(theirs if ours is None else token_ids(ours, replace(answer.source, field=name)))
    ids, sampled = found
    if answer.prompt_ids is not None and not np.array_equal(ids, answer.prompt_ids):
        raise _other_tokens(answer, "prompt_token_ids", "those of the answer", "others")
    if answer.prompt_tokens is not None and len(ids) - answer.prompt_tokens not in (0, answer.unbilled):
        raise _other_tokens(answer, "prompt_token_ids", answer.prompt_tokens, len(ids))
    ran = len(sampled) if answer.completion_tokens is None else answer.completion_tokens
    whole = answer.output_ids if answer.output_ids is not None and len(answer.output_ids) == ran else None
    if whole is not None and not np.array_equal(whole[: len(sampled)], sampled):
        raise _other_tokens(answer, "output_ids", "those of the answer", "others")
    trimmed = ran - len(sampled)
    if not 0 <= trimmed <= _TAKEN_BACK or (trimmed and whole is None and answer.finish not in _STOPPED):
        raise _other_tokens(answer, "output_ids", ran, len(sampled))
    return Tokens(np.concatenate([ids, sampled]), len(ids), trimmed)


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


def _sampled_by_them(
    routes: RoutedExperts, answer: Answer, tokens: Tokens, missing: Missing
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
            "routes that sampled the tokens (missing='native' leaves those rows without a route)",
            ", ".join(
                f"weights {span.version} for tokens {span.start} to {span.end}"
                for span in answer.weight_spans
            ),
        )
    recorded = routes.recorded.clone()
    first = max(0, tokens.prompt - 1)  # the row that the first output token was sampled from
    recorded[first : min(len(routes), max(0, first + newest))] = False
    ids = routes.ids.masked_fill(~recorded[:, None, None], 0)
    return routes._derived(ids, recorded, fingerprint=routes.fingerprint)


@functools.lru_cache(maxsize=8)  # once a process
def _warn_of_retractions(version: str) -> None:
    logger.warning(
        "[npu_replay] %s retracted a request and computed its routes again. If the weights were changed in "
        "between, they aren't those that sampled its first tokens, and the answer doesn't say so: those of "
        "SGLang 0.5.19 and later do",
        f"SGLang {version}".rstrip(),
    )


# ---- rows


def _is_before(answer: Answer, version: str) -> bool:
    """Is the engine known to be of an earlier release?"""
    known = answer.source.version
    return bool(known) and release(known) < release(version)


@dataclass(frozen=True)
class _Rows:
    """The rows of an answer, held against how many there may be.

    Attributes:
        start: rows before it aren't wanted, and this release leaves them out or sends them.
        wanted: of the sequence, from `start` on.
        ran: that the engine has from there on: for tokens too that the caller took off the end.
        past: exactly so many more lie behind the end, or none.
    """

    answer: Answer
    model: RoutedModel
    start: int
    wanted: int
    ran: int
    past: int

    @classmethod
    def of(cls, answer: Answer, model: RoutedModel, tokens: Tokens, start: int) -> _Rows:
        count = len(tokens.ids)
        if not 0 <= start <= count:
            problem = "start_len isn't in the sequence"
            raise answer.source.error(Symptom.SHAPE, problem, f"0 to {count}", start)
        last, past = max(0, count - 1), 0
        if _is_before(answer, STOPS_EXACTLY):
            # One row for each token that it ran, and two kinds are in no count: the drafts that were accepted
            # together with the end, and the token that a prefill samples though none was asked for.
            past = 1 if tokens.sampled == 0 and answer.ended else answer.drafted_past
        end = last + tokens.taken_off
        return cls(answer, model, min(start, end), max(0, last - start), max(0, end - start), past)

    @property
    def whole(self) -> int:
        """The rows from the first token on."""
        return self.start + self.ran

    @property
    def first(self) -> int:
        """The token of the first row that this release sends."""
        return 0 if _is_before(self.answer, HONOURS_START) else self.start

    @property
    def count(self) -> int:
        """The rows that this release sends."""
        return self.whole - self.first

    def readings(self, count: int) -> set[int]:
        """How many of the first of so many rows weren't asked for: one number, none where no release sends so
        many, or two where it can't be told."""
        more = (0, self.past)
        found = {self.start} if count - self.whole in more else set()
        if self.first == self.start and count - self.ran in more:
            found.add(0)
        return found or ({0} if count == 0 and not self.answer.ended else set())

    def read(self) -> Array:
        """Those of the sequence from its start on, [n, columns, topk], of any integer dtype.

        Raises:
            InvalidRoutes: there are none, they can't be read, or there are as many as no release sends.
        """
        ids = self.ids()
        if ids.ndim != 3:
            self.check_count(ids.size)
            ids = ids.reshape(-1, self.model.num_layers, self.model.topk)
        first = self.readings(len(ids))
        if len(first) != 1:
            raise self.wrong(len(ids))
        (first_wanted,) = first
        return ids[first_wanted : first_wanted + self.wanted]

    def ids(self) -> Array:
        """The ids as they came: flat, or in the shape that a tensor has."""
        data, source = as_numpy(self.answer.payload), self.answer.source
        if data is None or (isinstance(data, list) and not data):  # 0.5.8 says [] for none
            if self.ran == 0 or not self.answer.ended:
                return np.zeros(0, np.int32)
            problem = "there are no routes in the answer"
            raise source.error(Symptom.MISSING, problem, f"{self.ran} rows", "none")
        if isinstance(data, np.ndarray) and data.dtype.kind in "iu":
            return data
        data = bytes(data) if isinstance(data, (bytearray, memoryview)) else data
        if not isinstance(data, (str, bytes)):
            got = getattr(data, "dtype", type(data).__name__)
            raise source.unreadable("these aren't expert ids", "base64 of int32, or integers", got)
        # Bytes may be ids already: the fourth of an id is 0, or -1's, and neither is base64.
        if isinstance(data, str) or data[3:4] not in (b"\x00", b"\xff"):
            padding = data[-2:].count("=") if isinstance(data, str) else data[-2:].count(b"=")
            size = len(data) // 4 * 3 - padding
            if size % 4 == 0:  # a wrong count is found before the text is decoded
                self.check_count(size // 4)
            most = (self.whole + self.past) * self.model.num_layers * self.model.topk * 4
            data = from_base64(data, source=source, most=most)
        if len(data) % 4:
            raise source.unreadable("these aren't int32", "a multiple of 4 bytes", len(data))
        return np.frombuffer(data, "<i4")

    def check_count(self, count: int) -> None:
        """Refuse so many ids, naming the model that has as many for these tokens, if there is one."""
        layers, topk = self.model.num_layers, self.model.topk
        rows, rest = divmod(count, layers * topk)
        if not rest and self.readings(rows):
            return
        other = _that_fits(count, self.ran, self.model) or _that_fits(count, self.whole, self.model)
        if not rest and not other:
            raise self.wrong(rows)
        raise self.answer.source.error(
            Symptom.COLUMNS,
            f"{count} ids can't be shaped",
            f"{self.count * layers * topk}: {self.count} rows of {layers} layers with top-{topk}",
            f"what fits {other or 'no model of so many tokens'}",
        )

    def wrong(self, rows: int) -> InvalidRoutes:
        """So many rows are none of those that a release sends, or may be either of two."""
        if self.readings(rows):
            return replace(self.answer.source, faults=()).error(
                Symptom.TOO_MANY_ROWS,
                "so many rows may begin at the first token or at start_len",
                f"{self.ran} from token {self.start} on, or {self.whole} from the first on",
                f"{rows}: the whole sequence's, or those asked for and {self.past} that drafts ran past its "
                "end (ask without a start, or with another)",
            )
        return self.answer.source.error(
            Symptom.TOO_FEW_ROWS if rows < self.count else Symptom.TOO_MANY_ROWS,
            "the engine has rows for other tokens than these",
            f"{self.count} rows, from token {self.first} on; the last token has none",
            rows,
        )


def _that_fits(size: int, rows: int, model: RoutedModel) -> str:
    """The model that would have so many ids in so many rows, in words."""
    row, rest = divmod(size, rows) if rows else (0, 0)
    if rest or row in (0, model.num_layers * model.topk):
        return ""
    if row == len(model.sparse) * model.topk:
        return f"the {len(model.sparse)} MoE layers alone"
    layers, no_layers = divmod(row, model.topk)
    topk, no_topk = divmod(row, model.num_layers)
    fits = [] if no_layers else [f"{layers} layers with top-{model.topk}"]
    fits += [] if no_topk else [f"top-{topk} in {model.num_layers} layers"]
    return " or ".join(fits) or f"{row} ids a token"
