"""The door: what a rollout engine hands over is checked here, and leaves as RoutedExperts or as an error.

The commonest failure is an array that looks right and isn't: zeros, a layer that was never captured, rows of
another request. Nothing in it says so, so each way in which engines fail is looked for, and the error names
the likeliest fault of that engine and release.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import numpy as np
import torch

from npu_replay.errors import InvalidRoutes, one_of, shown
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.releases import Releases, tells_release
from npu_replay.routes import checks
from npu_replay.routes.checks import Array, Finding
from npu_replay.routes.routed_experts import RoutedExperts, narrow_array_dtype
from npu_replay.routes.token_ids import as_token_ids

Missing = Literal["error", "native"]

_log = logging.getLogger(__name__)


_CAUSES = 5
"""So many causes are named at most."""


class Symptom(str, Enum):
    """What is seen to be wrong with an engine's routes."""

    MISSING = "missing"
    UNREADABLE = "unreadable"
    SHAPE = "shape"
    COLUMNS = "columns"
    TOPK = "topk"
    TOO_FEW_ROWS = "too few rows"
    TOO_MANY_ROWS = "too many rows"
    RANGE = "range"
    ZEROS = "zeros"
    ZERO_ROWS = "zero rows"
    CONSTANT_LAYER = "constant layer"
    DUPLICATES = "duplicates"
    DENSE_COLUMN = "dense column"
    STALE_ROWS = "stale rows"


@dataclass(frozen=True, kw_only=True)
class Fault(Releases):
    """One known fault of an engine: the releases that have it, how it shows, what it is.

    Attributes:
        symptom: how it shows.
        cause: for the user: what it is, what to do.
        sure: it explains the symptom by itself: in its releases no other is named after it.
    """

    symptom: Symptom
    cause: str
    sure: bool = False


@dataclass(frozen=True, kw_only=True)
class Source:
    """Whose data it is, for messages.

    Attributes:
        engine: «vLLM».
        version: its release, where known.
        device: what it ran on, where known: «cuda», «npu», «cpu».
        sample: «request 17, completion 2».
        field: where in the engine's answer: «choices[0].routed_experts».
        faults: what is known to be wrong with the engine, the likeliest first; the first few that fit are
            named.
    """

    engine: str
    version: str = ""
    device: str = ""
    sample: str = ""
    field: str = ""
    faults: tuple[Fault, ...] = ()

    def error(
        self, symptom: Symptom, problem: str, *, expected: object = None, got: object = None, where: str = ""
    ) -> InvalidRoutes:
        """An error about this data, with the likeliest known cause."""
        engine = f"{self.engine} {self.version}".rstrip()
        parts = (engine, self.sample, self.field, where)
        return InvalidRoutes(
            problem,
            where=", ".join(part for part in parts if part),
            expected=expected,
            got=got,
            cause=self._cause(symptom),
        )

    def _cause(self, symptom: Symptom) -> str:
        causes: list[str] = []
        for fault in self.faults:
            if (
                fault.symptom is symptom
                and fault.holds(self.version, self.device)
                and fault.cause not in causes
            ):
                causes.append(fault.cause)
                if fault.sure and tells_release(self.version):
                    break
        return "; or ".join(causes[:_CAUSES])


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
    ids = _token_ids(tokens, source)
    rows = _in_columns(_in_rows(rows, len(ids), start, ended, surplus, source), model, source, start)
    found = checks.find_outside(rows, model.num_experts, first_row=start)
    _refuse(found, Symptom.RANGE, model, source)
    blank = _blank_rows(rows, model, missing, source, start)
    room = np.zeros((len(ids), len(model.layers), model.topk), narrow_array_dtype(model.num_experts))
    there = room[start : start + len(rows)]
    np.copyto(there, rows, casting="unsafe")
    recorded = np.zeros(len(ids), bool)
    recorded[start : start + len(rows)] = True
    recorded[start + blank] = False
    known = recorded[start : start + len(rows)]
    constant = checks.find_constant(there, known, model.num_experts, ids[start:])
    _refuse(constant, Symptom.CONSTANT_LAYER, model, source)
    _refuse(checks.find_twice(there, known, start), Symptom.DUPLICATES, model, source)
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


def _token_ids(tokens: Any, source: Source) -> Array:
    """[tokens] int64."""
    ids = as_token_ids(tokens)
    if ids is not None:
        return ids
    raise source.error(
        Symptom.UNREADABLE, "these aren't token ids", expected="integers, [tokens]", got=shown(tokens)
    )


def _in_rows(rows: Any, tokens: int, start: int, ended: bool, surplus: int, source: Source) -> Array:
    """Exactly as many rows as the engine has run tokens: one row more or less would shift them all unnoticed.
    What was aborted may have none."""
    if not checks.is_ids(rows):
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
        _check_dense(rows, model, source, start)
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


def _check_dense(rows: Array, model: RoutedModel, source: Source, start: int) -> None:
    """The columns of dense layers are zeros, or the labels have shifted."""
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


def _refuse(found: Finding | None, symptom: Symptom, model: RoutedModel, source: Source) -> None:
    if found is not None:
        where = "" if found.column is None else f"layer {model.layers[found.column]}"
        raise source.error(symptom, found.problem, expected=found.expected, got=found.got, where=where)


def _blank_rows(rows: Array, model: RoutedModel, missing: Missing, source: Source, start: int) -> Array:
    """The rows that were never written. With a top-k of 1 they can't be told from expert 0, but where all of
    many layers say so."""
    if model.topk == 1 and _bits(model) < checks.SURE_BITS:
        return np.empty(0, np.int64)
    blank = checks.blank_rows(rows)
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
    if _bits(model) < checks.SURE_BITS:
        return np.empty(0, np.int64)
    if recorded.all():
        stale = checks.repeated_rows(rows, tokens)
    else:
        at = np.flatnonzero(recorded)
        stale = at[checks.repeated_rows(rows[at], tokens[at])]
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
    return len(model.layers) * checks.choice(model.num_experts, model.topk)
