"""SGLang's ids, out of whatever they came in, as rows.

They come flat and say nothing of their shape, [rows, decoder layers, top-k] with a row for each token but the
last. So their count is all that can tell a wrong model, a missing row or another request's routes, and it is
held against what this release sends before anything is decoded.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeGuard

import numpy as np
import torch

from npu_replay.compat.sglang.answers import Answer
from npu_replay.compat.sglang.faults import HONOURS_START, STOPS_EXACTLY
from npu_replay.errors import InvalidRoutes
from npu_replay.rollout import payloads
from npu_replay.rollout.admit import Symptom
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.releases import release
from npu_replay.routes.checks import Array

TAKEN_BACK = 64
"""So many of the engine's tokens at most may the caller have taken off the end: a stop string's."""


@dataclass(frozen=True)
class Plan:
    """How many rows there may be.

    Attributes:
        wanted: of the sequence, from `start` on.
        ran: that the engine has, from `start` on: for tokens too that were trimmed from the sequence.
        start: rows before it are left out, or not, as `honours` says: None where the release isn't known.
        past: exactly so many more lie behind the end, or none.
        aborted: there may be none at all.
    """

    wanted: int
    ran: int
    start: int
    honours: bool | None
    past: int
    aborted: bool

    @classmethod
    def of(cls, answer: Answer, tokens: int, sampled: int, trimmed: int, start: int) -> Plan:
        """What this answer may hold of `tokens` tokens: the engine sampled `sampled`, of which `trimmed`
        aren't among them."""
        version = answer.source.version
        if not 0 <= start <= tokens:
            raise answer.source.error(
                Symptom.SHAPE,
                "start_len isn't in the sequence",
                expected=f"0 to {tokens}",
                got=start,
            )
        whole = max(0, tokens - 1)
        aborted = answer.finish == "abort"
        return cls(
            wanted=max(0, whole - start),
            ran=max(0, whole + trimmed - start),
            start=min(start, whole + trimmed),
            honours=release(version) >= release(HONOURS_START) if version else None,
            past=_past_the_end(answer, sampled, aborted),
            aborted=aborted,
        )

    @property
    def due_from(self) -> int:
        """The token of the first row that this release sends."""
        return 0 if self.honours is False else self.start

    @property
    def due(self) -> int:
        """The rows that this release sends."""
        return self.start + self.ran - self.due_from

    @property
    def most(self) -> int:
        """As many as any release may send."""
        return self.start + self.ran + self.past

    def readings(self, count: int) -> set[int]:
        """How many of the first of so many rows weren't asked for: one number, none where no release sends so
        many, or two where it can't be told."""
        whole = self.start + self.ran
        found = {self.start for past in (0, self.past) if count == whole + past}
        if self.honours is not False:
            found |= {0 for past in (0, self.past) if count == self.ran + past}
        return found or ({0} if self.aborted and count == 0 else set())


def _past_the_end(answer: Answer, sampled: int, aborted: bool) -> int:
    """How many rows more a release before 0.5.13 has than it counts tokens.

    It has one for each token that it ran, and two kinds are in no count: the drafts that were accepted
    together with the end, and the token that a prefill samples though none was asked for.
    """
    version = answer.source.version
    if not version or release(version) >= release(STOPS_EXACTLY):
        return 0
    return 1 if sampled == 0 and not aborted else answer.drafted_past


def rows_of(answer: Answer, model: RoutedModel, plan: Plan) -> Array:
    """The rows of the sequence from its start on, [n, columns, topk], of any integer dtype.

    Raises:
        InvalidRoutes: there are none, they can't be read, or there are as many as no release sends.
    """
    ids = _ids(answer, model, plan)
    if ids.ndim != 3:
        _check_count(ids.size, answer, model, plan)
        ids = ids.reshape(-1, model.num_layers, model.topk)
    first = plan.readings(len(ids))
    if len(first) != 1:
        raise _wrong_rows(len(ids), answer, plan)
    (first_wanted,) = first
    return ids[first_wanted : first_wanted + plan.wanted]


def _ids(answer: Answer, model: RoutedModel, plan: Plan) -> Array:
    """The ids as they came: flat, or in the shape that a tensor has."""
    payload, source = answer.payload, answer.source
    if payload is None or (isinstance(payload, list) and not payload):  # 0.5.8 says [] for none
        if plan.aborted or plan.ran == 0:
            return np.zeros(0, np.int32)
        raise source.error(
            Symptom.MISSING, "there are no routes in the answer", expected=f"{plan.ran} rows", got="none"
        )
    if isinstance(payload, torch.Tensor):
        with suppress(TypeError, RuntimeError):  # sparse, quantised, of a dtype that numpy hasn't: no ids
            payload = payload.detach().cpu().numpy()
    if isinstance(payload, np.ndarray) and payload.dtype.kind in "iu":
        return payload
    if isinstance(payload, (bytearray, memoryview)):
        payload = bytes(payload)
    if not isinstance(payload, (str, bytes)):
        kind = getattr(payload, "dtype", type(payload).__name__)
        raise source.error(
            Symptom.UNREADABLE, "these aren't expert ids", expected="base64 of int32, or integers", got=kind
        )
    data = payload if _is_raw(payload) else _decoded(payload, answer, model, plan)
    if len(data) % 4:
        raise source.error(
            Symptom.UNREADABLE, "these aren't int32", expected="a multiple of 4 bytes", got=len(data)
        )
    return np.frombuffer(data, "<i4")


def _is_raw(payload: str | bytes) -> TypeGuard[bytes]:
    """Bytes that somebody decoded already? The fourth of an id is 0, or -1's, and neither is base64."""
    return isinstance(payload, bytes) and payload[3:4] in (b"\x00", b"\xff")


def _decoded(text: str | bytes, answer: Answer, model: RoutedModel, plan: Plan) -> bytes:
    """The text's length says how many ids it holds, so a wrong count is found before it is decoded."""
    padding = "=" if isinstance(text, str) else b"="
    size = len(text) // 4 * 3 - text[-2:].count(padding)  # type: ignore[arg-type]  # of its own kind
    if size % 4 == 0:
        _check_count(size // 4, answer, model, plan)
    return payloads.from_base64(
        text, source=answer.source, most=plan.most * model.num_layers * model.topk * 4
    )


def _check_count(count: int, answer: Answer, model: RoutedModel, plan: Plan) -> None:
    """Refuse so many ids, naming the model that has as many for these tokens, if there is one."""
    row = model.num_layers * model.topk
    rows, rest = divmod(count, row)
    if not rest and plan.readings(rows):
        return
    other = _that_fits(count, model, plan)
    if not rest and not other:
        raise _wrong_rows(rows, answer, plan)
    raise answer.source.error(
        Symptom.COLUMNS,
        f"{count} ids can't be shaped",
        expected=f"{plan.due * row}: {plan.due} rows of {model.num_layers} layers with top-{model.topk}",
        got=f"what fits {other or 'no model of so many tokens'}",
    )


def _wrong_rows(rows: int, answer: Answer, plan: Plan) -> InvalidRoutes:
    if plan.readings(rows):
        return replace(answer.source, faults=()).error(
            Symptom.TOO_MANY_ROWS,
            "so many rows may begin at the first token or at start_len",
            expected=f"{plan.ran} from token {plan.start} on, or {plan.start + plan.ran} from the first on",
            got=f"{rows}: the whole sequence's, or those asked for and {plan.past} that drafts ran past its "
            "end (ask without a start, or with another)",
        )
    return answer.source.error(
        Symptom.TOO_FEW_ROWS if rows < plan.due else Symptom.TOO_MANY_ROWS,
        "the engine has rows for other tokens than these",
        expected=f"{plan.due} rows, from token {plan.due_from} on; the last token has none",
        got=rows,
    )


def _that_fits(size: int, model: RoutedModel, plan: Plan) -> str:
    """The model that would have so many ids for these tokens, in words."""
    for rows in (plan.ran, plan.start + plan.ran):
        row, rest = divmod(size, rows) if rows else (0, 0)
        if rest or row in (0, model.num_layers * model.topk):
            continue
        if row == len(model.sparse) * model.topk:
            return f"the {len(model.sparse)} MoE layers alone"
        fits = [f"{row // model.topk} layers with top-{model.topk}"] if row % model.topk == 0 else []
        fits += [f"top-{row // model.num_layers} in {model.num_layers} layers"] * (
            row % model.num_layers == 0
        )
        return " or ".join(fits) or f"{row} ids a token"
    return ""
