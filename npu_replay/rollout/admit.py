"""What a rollout engine hands over is checked here, and leaves as RoutedExperts or as an error.

The commonest failure is an array that looks right and isn't: zeros, a layer that was never captured, rows of
another request. Nothing in it says so, so each way in which engines fail is looked for, and the error names
the likeliest fault of that engine and release.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from npu_replay.errors import InvalidRoutes, one_of
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.payloads import TokenIds, not_ids, token_ids
from npu_replay.rollout.release_rules import Source, Symptom
from npu_replay.routes import checks
from npu_replay.routes.checks import Array, Finding
from npu_replay.routes.routed_experts import RoutedExperts, narrow_array_dtype

Missing = Literal["error", "native"]

_log = logging.getLogger(__name__)


def admit(
    rows: Any,
    *,
    model: RoutedModel,
    tokens: TokenIds,
    source: Source,
    start: int = 0,
    ended: bool = True,
    surplus: int = 0,
    missing: Missing = "error",
    weight_version: int | str | None = None,
) -> RoutedExperts:
    """Check an engine's array and make it the routes of its sequence.

    >>> from npu_replay.rollout.release_rules import Source
    >>> model = npu_replay.RoutedModel(layers=(1,), num_layers=2, num_experts=4, topk=2)
    >>> rows = np.array([[[0, 0], [3, 1]], [[0, 0], [2, 0]]], "u1")
    >>> routes = admit(rows, model=model, tokens=[11, 12, 13], source=Source(engine="mine"))
    >>> routes.layers, routes.recorded.tolist(), routes.ids[0].tolist()
    ((1,), [True, True, False], [[3, 1]])

    Args:
        rows: [n, columns, topk], any integer dtype, read-only or not: row i is the token at start + i. The
            columns are all decoder layers, of which the dense are dropped by label, or the MoE layers only.
        model: which layers route, and over how many experts.
        tokens: [tokens], ids of prompt and output. The last has no row: the engine never ran it.
        source: for messages.
        start: the first row's token; those before have no route.
        ended: the engine ended the request by itself. One that was aborted may have no rows at all.
        surplus: exactly so many tokens of the engine's were taken off the end of `tokens`; so are their rows.
        missing: "native" leaves rows that are zero in all layers without a route; else they are an error. So
            are zeros throughout, always. Many copies of other tokens' rows likewise.
        weight_version: which weights chose, if known.

    Returns:
        One row a token, with the fingerprint of `tokens`.

    Raises:
        InvalidRoutes: what is wrong, where, and the likeliest fault of the engine.
    """
    one_of(missing, ("error", "native"), "way with missing rows", "missing", InvalidRoutes)
    ids = token_ids(tokens, source)
    arrival = _Arrival(model, source, ids, start, missing)
    rows = arrival.routed_columns(arrival.due_rows(rows, ended, surplus))
    here = slice(start, start + len(rows))
    arrival.refuse(Symptom.RANGE, checks.find_outside(rows, model.num_experts, first_row=start))
    recorded = np.zeros(len(ids), bool)
    recorded[here] = True
    recorded[start + arrival.blank_rows(rows)] = False
    room = np.zeros((len(ids), len(model.layers), model.topk), narrow_array_dtype(model.num_experts))
    np.copyto(room[here], rows, casting="unsafe")
    there, known = room[here], recorded[here]
    constant = checks.find_constant(there, known, model.num_experts, ids[start:])
    arrival.refuse(Symptom.CONSTANT_LAYER, constant)
    arrival.refuse(Symptom.DUPLICATES, checks.find_twice(there, known, start))
    copied = arrival.copied_rows(there, known)
    there[copied], known[copied] = 0, False
    return RoutedExperts._checked(
        ids=torch.from_numpy(room),
        layers=model.layers,
        num_experts=model.num_experts,
        recorded=torch.from_numpy(recorded),
        tokens=ids,
        weight_version=weight_version,
    )


def check_dense(rows: Array, model: RoutedModel) -> None:
    """Refuse ids, [n, decoder layers, topk], in the columns of dense layers: labels have shifted.

    Raises:
        InvalidRoutes: a dense layer has experts.
    """
    _Arrival(model, Source(engine=""), rows[:0], 0, "error").refuse_dense(rows)


@dataclass(frozen=True)
class _Arrival:
    """Somebody's rows, and all that is known beside them: as `admit` takes it."""

    model: RoutedModel
    source: Source
    tokens: Array
    start: int
    missing: Missing

    def refuse(self, symptom: Symptom, found: Finding | None) -> None:
        if found is not None:
            where = found.layer(self.model.layers)
            raise self.source.error(symptom, found.problem, found.expected, found.got, where=where)

    def due_rows(self, rows: Any, ended: bool, surplus: int) -> Array:
        """Exactly as many rows as the engine has run tokens: one row more or less would shift them all
        unnoticed. What was aborted may have none."""
        tokens, start = len(self.tokens), self.start
        if not checks.is_ids(rows):
            raise not_ids(self.source, rows)
        if not 0 <= start <= tokens:
            problem = "the first row's token isn't in the sequence"
            raise self.source.error(Symptom.SHAPE, problem, f"0 to {tokens}", start)
        wanted = max(0, tokens - 1 - start + surplus)
        if len(rows) == wanted or (len(rows) == 0 and not ended):
            return rows[: max(0, tokens - 1 - start)]
        few = len(rows) < wanted
        taken_off = f", and {surplus} more that were taken off its end" if surplus else ""
        raise self.source.error(
            Symptom.TOO_FEW_ROWS if few else Symptom.TOO_MANY_ROWS,
            f"the engine has rows for {'fewer' if few else 'more'} tokens than it ran",
            f"{wanted} rows ({tokens} tokens from {start} on{taken_off}; the last has none)",
            len(rows),
        )

    def routed_columns(self, rows: Array) -> Array:
        """The columns of the MoE layers."""
        model, (columns, topk) = self.model, rows.shape[1:]
        if topk != model.topk:
            problem = "the engine's top-k isn't the model's"
            raise self.source.error(Symptom.TOPK, problem, f"{model.topk} ids", topk)
        wanted = model.routed_columns(columns)
        if wanted is None:
            raise self.source.error(
                Symptom.COLUMNS,
                "the engine's columns are neither all decoder layers nor the MoE layers",
                f"{model.num_layers}, or {len(model.sparse)}",
                columns,
            )
        if columns == model.num_layers:
            self.refuse_dense(rows)
        return rows[:, wanted]

    def refuse_dense(self, rows: Array) -> None:
        dense = rows[:, list(self.model.dense)]
        if dense.any():
            row, column, _ = np.argwhere(dense)[0]
            raise self.source.error(
                Symptom.DENSE_COLUMN,
                "a dense layer has experts",
                "zeros in the columns of dense layers",
                f"{dense[row, column].tolist()} in row {self.start + row}",
                where=f"layer {self.model.dense[column]}",
            )

    def blank_rows(self, rows: Array) -> Array:
        """The rows that were never written. With a top-k of 1 they can't be told from expert 0, but where all
        of many layers say so."""
        topk = self.model.topk
        if topk == 1 and not checks.tells_apart(len(self.model.layers), self.model.num_experts, topk):
            return np.empty(0, np.int64)
        blank = checks.blank_rows(rows)
        different = f"{topk} different experts a token"
        if len(blank) and len(blank) == len(rows):
            problem, got = f"all {len(rows)} rows are zeros", "nothing that was captured"
            raise self.source.error(Symptom.ZEROS, problem, different, got)
        if len(blank) and self.missing == "error":
            problem = f"{len(blank)} of {len(rows)} rows are zeros in all layers"
            got = f"the first is row {self.start + blank[0]}, the last {self.start + blank[-1]}"
            raise self.source.error(Symptom.ZERO_ROWS, problem, different, got)
        return blank

    def copied_rows(self, rows: Array, recorded: Array) -> Array:
        """Return the rows that are another token's: they were read from a buffer too late."""
        tokens = self.tokens[self.start :]
        copied = checks.copied_rows(rows, recorded, self.model.num_experts, tokens)
        if not len(copied):
            return copied
        error = self.source.error(
            Symptom.STALE_ROWS,
            f"{len(copied)} rows are another token's in all layers, the first is row "
            f"{self.start + copied[0]}",
            "routes that depend on the token",
            f"a copy, for token {int(tokens[copied[0]])}",
        )
        if self.missing == "error":
            raise error
        _log.warning("%s. They are left without a route", error)
        return copied
