"""The door: what a rollout engine hands over is checked here, and leaves as RoutedExperts or as an error.

The commonest failure is an array that looks right and isn't: zeros, a layer that was never captured, rows of
another request. Nothing in it says so, so each way in which engines fail is looked for, and the error names
the likeliest fault of that engine and release.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import torch

from npu_replay.errors import InvalidRoutes, one_of
from npu_replay.rollout.faults import Source, Symptom
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.payloads import token_ids
from npu_replay.routes import checks as id_checks
from npu_replay.routes.checks import Array
from npu_replay.routes.routed_experts import RoutedExperts, narrow_array_dtype

Missing = Literal["error", "native"]

_log = logging.getLogger(__name__)
_NOBODY = Source(engine="")


def admit(
    rows: Any,
    *,
    model: RoutedModel,
    tokens: Sequence[int] | Array | torch.Tensor,
    source: Source,
    start: int = 0,
    ended: bool = True,
    surplus: int = 0,
    missing: Missing = "error",
    weight_version: int | str | None = None,
) -> RoutedExperts:
    """Check an engine's array and make it the routes of its sequence.

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
            are zeros throughout, always. Rows that are another token's likewise.
        weight_version: which weights chose, if known.

    Returns:
        One row a token, with the fingerprint of `tokens`.

    Raises:
        InvalidRoutes: what is wrong, where, and the likeliest fault of the engine.
    """
    one_of(missing, ("error", "native"), "way with missing rows", "missing", InvalidRoutes)
    ids = token_ids(tokens, source)
    rows = _in_columns(_in_rows(rows, len(ids), start, ended, surplus, source), model, source, start)
    _check_range(rows, model, source, start)
    blank = _blank_rows(rows, model, missing, source, start)
    room = np.zeros((len(ids), len(model.layers), model.topk), narrow_array_dtype(model.num_experts))
    there = room[start : start + len(rows)]
    np.copyto(there, rows, casting="unsafe")
    recorded = np.zeros(len(ids), bool)
    recorded[start : start + len(rows)] = True
    recorded[start + blank] = False
    known = recorded[start : start + len(rows)]
    _check_rows(there, known, ids[start:], model, source, start)
    stale = _stale_rows(there, known, ids[start:], model, missing, source, start)
    there[stale], known[stale] = 0, False
    return RoutedExperts._checked(
        ids=torch.from_numpy(room),
        layers=model.layers,
        num_experts=model.num_experts,
        recorded=torch.from_numpy(recorded),
        tokens=ids,
        weight_version=weight_version,
    )


def _in_rows(rows: Any, tokens: int, start: int, ended: bool, surplus: int, source: Source) -> Array:
    """Exactly as many rows as the engine has run tokens: one row more or less would shift them all unnoticed.
    What was aborted may have none."""
    if not isinstance(rows, np.ndarray) or rows.ndim != 3 or rows.dtype.kind not in "iu":
        raise source.error(
            Symptom.SHAPE,
            "this isn't an array of expert ids",
            expected="integers, [tokens, layers, topk]",
            got=f"{rows.dtype} {list(rows.shape)}" if isinstance(rows, np.ndarray) else type(rows).__name__,
        )
    if not 0 <= start <= tokens:
        raise source.error(
            Symptom.SHAPE, "the first row's token isn't in the sequence", expected=f"0 to {tokens}", got=start
        )
    wanted = max(0, tokens - 1 - start + surplus)
    if len(rows) == wanted or (len(rows) == 0 and not ended):
        return rows[: max(0, tokens - 1 - start)]
    few = len(rows) < wanted
    taken_off = f", and {surplus} more that were taken off its end" if surplus else ""
    raise source.error(
        Symptom.TOO_FEW_ROWS if few else Symptom.TOO_MANY_ROWS,
        f"the engine has rows for {'fewer' if few else 'more'} tokens than it ran",
        expected=f"{wanted} rows ({tokens} tokens from {start} on{taken_off}; the last has none)",
        got=len(rows),
    )


def _in_columns(rows: Array, model: RoutedModel, source: Source, start: int) -> Array:
    """The columns of the MoE layers."""
    columns, topk = rows.shape[1:]
    if topk != model.topk:
        raise source.error(
            Symptom.TOPK, "the engine's top-k isn't the model's", expected=f"{model.topk} ids", got=topk
        )
    if columns == model.num_layers:
        check_dense(rows, model, source, start)
        labels = tuple(range(columns))
    elif columns == len(model.sparse):
        labels = model.sparse
    else:
        raise source.error(
            Symptom.COLUMNS,
            "the engine's columns are neither all decoder layers nor the MoE layers",
            expected=f"{model.num_layers}, or {len(model.sparse)}",
            got=columns,
        )
    wanted = [labels.index(layer) for layer in model.layers]
    if wanted[-1] - wanted[0] == len(wanted) - 1:
        return rows[:, wanted[0] : wanted[-1] + 1]  # neighbours aren't copied
    return rows[:, wanted]


def check_dense(rows: Array, model: RoutedModel, source: Source = _NOBODY, start: int = 0) -> None:
    """The columns of dense layers are zeros, or an engine's labels have shifted.

    Args:
        rows: [n, decoder layers, topk].

    Raises:
        InvalidRoutes: a dense layer has experts.
    """
    dense = rows[:, list(model.dense)]
    if dense.any():
        row, column, _ = np.argwhere(dense)[0]
        raise source.error(
            Symptom.DENSE_COLUMN,
            "a dense layer has experts",
            where=f"layer {model.dense[column]}",
            expected="zeros in the columns of dense layers",
            got=f"{dense[row, column].tolist()} in row {start + row}",
        )


def _check_range(rows: Array, model: RoutedModel, source: Source, start: int) -> None:
    if not id_checks.holds(rows.dtype, model.num_experts):
        raise source.error(
            Symptom.RANGE,
            "the ids' dtype can't hold every expert",
            expected=f"0 to {model.num_experts - 1}",
            got=f"{rows.dtype}, 0 to {np.iinfo(rows.dtype).max}",
        )
    outside = id_checks.outside(rows, model.num_experts, np.ones(len(rows), bool))
    if len(outside):
        row, column, slot = outside[0]
        raise source.error(
            Symptom.RANGE,
            f"an id is out of range, the first in row {start + row}",
            where=f"layer {model.layers[column]}",
            expected=f"0 to {model.num_experts - 1}",
            got=int(rows[row, column, slot]),
        )


def _blank_rows(rows: Array, model: RoutedModel, missing: Missing, source: Source, start: int) -> Array:
    """The rows that were never written. With a top-k of 1 they can't be told from expert 0, but where all of
    many layers say so."""
    if model.topk == 1 and _bits(model) < id_checks.SURE_BITS:
        return np.empty(0, np.int64)
    blank = id_checks.blank_rows(rows)
    if len(blank) and len(blank) == len(rows):
        raise source.error(
            Symptom.ZEROS,
            f"all {len(rows)} rows are zeros",
            expected=f"{model.topk} different experts a token",
            got="nothing that was captured",
        )
    if len(blank) and missing == "error":
        raise source.error(
            Symptom.ZERO_ROWS,
            f"{len(blank)} of {len(rows)} rows are zeros in all layers",
            expected=f"{model.topk} different experts a token",
            got=f"the first is row {start + blank[0]}, the last {start + blank[-1]}",
        )
    return blank


def _check_rows(
    rows: Array, recorded: Array, tokens: Array, model: RoutedModel, source: Source, start: int
) -> None:
    twice = id_checks.named_twice(rows, recorded)
    constant = id_checks.constant_layers(rows, recorded, model.num_experts, tokens)
    if len(constant):
        raise source.error(
            Symptom.CONSTANT_LAYER,
            f"all {int(recorded.sum())} rows are the same ({len(constant)} such layers)",
            where=f"layer {model.layers[constant[0]]}",
            expected="routes that depend on the token",
            got=rows[recorded.argmax(), constant[0]].tolist(),
        )
    if len(twice):
        row, column = twice[0]
        raise source.error(
            Symptom.DUPLICATES,
            f"{len(twice)} token-layers name an expert twice, the first in row {start + row}",
            where=f"layer {model.layers[column]}",
            expected=f"{model.topk} different experts",
            got=rows[row, column].tolist(),
        )


def _stale_rows(
    rows: Array,
    recorded: Array,
    tokens: Array,
    model: RoutedModel,
    missing: Missing,
    source: Source,
    start: int,
) -> Array:
    """The rows that are another token's: they were read from a buffer too late."""
    if _bits(model) < id_checks.SURE_BITS:
        return np.empty(0, np.int64)
    if recorded.all():
        stale = id_checks.repeated_rows(rows, tokens)
    else:
        at = np.flatnonzero(recorded)
        stale = at[id_checks.repeated_rows(rows[at], tokens[at])]
    if not len(stale):
        return stale
    error = source.error(
        Symptom.STALE_ROWS,
        f"{len(stale)} rows are another token's in all layers, the first is row {start + stale[0]}",
        expected="routes that depend on the token",
        got=f"a copy, for token {int(tokens[stale[0]])}",
    )
    if missing == "error":
        raise error
    _log.warning("%s. They are left without a route", error)
    return stale


def _bits(model: RoutedModel) -> float:
    """How much choice a token has in all layers together."""
    return len(model.layers) * id_checks.choice(model.num_experts, model.topk)
