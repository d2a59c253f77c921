"""SGLang's ids, out of whatever they came in, as rows.

They come flat and say nothing of their shape, [rows, decoder layers, top-k] with a row for each token but the
last. So their count is all that can tell a wrong model, a missing row or another request's routes, and it is
held against what this release sends before anything is decoded.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TypeGuard

import numpy as np
import torch

from npu_replay import array_text
from npu_replay.compat.sglang_answer import Answer
from npu_replay.compat.sglang_releases import HONOURS_START, STOPS_EXACTLY
from npu_replay.door import Symptom, release
from npu_replay.errors import InvalidRoutes
from npu_replay.id_checks import Array
from npu_replay.routed_model import RoutedModel

TAKEN_BACK = 64
"""So many tokens at most may lie behind those that count: a stop string's, or a draft's that ran past it."""


@dataclass(frozen=True)
class Plan:
    """How many rows there may be.

    Attributes:
        wanted: of the sequence, from `start` on.
        ran: that the engine has, from `start` on: for tokens too that were trimmed from the sequence.
        start: rows before it are left out, or not, as `honours` says: None where the release isn't known.
        spare: so many more may lie behind the end.
        aborted: fewer may be there, or none.
    """

    wanted: int
    ran: int
    start: int
    honours: bool | None
    spare: int
    aborted: bool

    @classmethod
    def of(cls, answer: Answer, tokens: int, trimmed: int, start: int) -> Plan:
        """What this answer may hold of `tokens` tokens, of which `trimmed` more were sampled."""
        version = answer.source.version
        if type(start) is not int or not 0 <= start <= tokens:
            raise answer.source.error(
                Symptom.SHAPE,
                "start_len isn't in the sequence",
                expected=f"0 to {tokens}",
                got=start,
            )
        whole = max(0, tokens - 1)
        return cls(
            wanted=max(0, whole - start),
            ran=max(0, whole + trimmed - start),
            start=min(start, whole + trimmed),
            honours=release(version) >= release(HONOURS_START) if version else None,
            spare=TAKEN_BACK if version and release(version) < release(STOPS_EXACTLY) else 0,
            aborted=answer.finish == "abort",
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
        return self.start + self.ran + self.spare

    def superfluous(self, count: int) -> int | None:
        """How many of the first rows weren't asked for; None if no release sends so many rows."""
        if self.honours is not False and self.ran <= count <= self.ran + self.spare:
            return 0
        if self.start + self.ran <= count <= self.most:
            return self.start
        if self.aborted and count < self.ran and (self.start == 0 or self.honours is not None or count == 0):
            return self.start if self.honours is False else 0
        return None


def rows_of(answer: Answer, model: RoutedModel, plan: Plan) -> Array:
    """The rows of the sequence from its start on, [n, columns, topk], of any integer dtype.

    Raises:
        InvalidRoutes: there are none, they can't be read, or there are as many as no release sends.
    """
    ids = _ids(answer, model, plan)
    if ids.ndim != 3:
        _check_count(ids.size, answer, model, plan)
        ids = ids.reshape(-1, model.num_layers, model.topk)
    first = plan.superfluous(len(ids))
    if first is None:
        raise _wrong_rows(len(ids), answer, plan)
    return ids[first : first + plan.wanted]


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
    return array_text.from_base64(
        text, source=answer.source, most=plan.most * model.num_layers * model.topk * 4
    )


def _check_count(count: int, answer: Answer, model: RoutedModel, plan: Plan) -> None:
    """Refuse so many ids, naming the model that has as many for these tokens, if there is one."""
    row = model.num_layers * model.topk
    rows, rest = divmod(count, row)
    if not rest and plan.superfluous(rows) is not None:
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
