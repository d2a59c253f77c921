"""Checks the arrays of a rollout engine and returns them as RoutedExperts, or raises.

The commonest failure is an array that looks right and isn't: zeros, a layer that was never captured, rows of
another request. Each way in which engines fail is looked for, and the error names the likeliest fault of that
engine and release.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

import numpy as np
import torch

from npu_replay.errors import InvalidRoutes, MicroBatchError, one_of
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.payloads import TokenIds, not_ids, token_ids
from npu_replay.rollout.release_rules import Source, Symptom
from npu_replay.routes import arguments, checks
from npu_replay.routes.checks import Array, Finding
from npu_replay.routes.fingerprint import fingerprint
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
    """Check an engine's array and make it the routes of its sequence, one row per token.

    >>> from npu_replay.rollout.release_rules import Source
    >>> model = npu_replay.RoutedModel(layers=(1,), num_layers=2, num_experts=4, topk=2)
    >>> rows = np.array([[[0, 0], [3, 1]], [[0, 0], [2, 0]]], "u1")
    >>> routes = admit(rows, model=model, tokens=[11, 12, 13], source=Source(engine="mine"))
    >>> routes.layers, routes.recorded.tolist(), routes.ids[0].tolist()
    ((1,), [True, True, False], [[3, 1]])

    Args:
        rows: [n, columns, topk], any integer dtype; row i is of the token at start + i. The columns are all
            decoder layers, of which the dense are dropped by label, or the MoE layers only.
        tokens: [tokens], ids of prompt and output. The last has no row, since the engine never ran it; where
            there is a surplus it did, and has one.
        ended: False for a request that was aborted, which may have no rows at all.
        surplus: the number of tokens that were removed from the end of `tokens`; their rows are removed too.
        missing: "native" leaves rows that stand for none in all layers (zeros, -1, or consecutive ids, with
            which somebody padded), or many copies of other tokens' rows, without a route; "error" refuses
            them. If there is no other row that is always an error.
    """
    one_of(missing, ("error", "native"), "way with missing rows", "missing", InvalidRoutes)
    ids = token_ids(tokens, source)
    rows = _routed_rows(rows, model, len(ids), start, ended, surplus, source)
    mine = ids[start : start + len(rows)]
    experts = model.num_experts

    def refuse(symptom: Symptom, finding: Finding | None) -> None:
        if finding is not None:
            raise source.error(
                symptom, finding.problem, finding.expected, finding.got, where=finding.layer(model.layers)
            )

    empty = checks.rows_without_route(rows, experts)
    written = np.ones(len(rows), bool)
    for places in empty.values():
        written[places] = False
    refuse(Symptom.RANGE, checks.find_outside(rows, experts, written, start))
    room = np.zeros((len(ids), len(model.layers), model.topk), narrow_array_dtype(experts))
    recorded = np.zeros(len(ids), bool)
    # Views: what is marked in them is marked in the result.
    there = room[start : start + len(rows)]
    known = recorded[start : start + len(rows)]
    np.copyto(there, rows, casting="unsafe")
    known[:] = written
    there[~written] = 0

    blank = np.flatnonzero(~written)
    kinds = " or ".join(empty)
    different = f"{model.topk} different experts a token"
    if len(blank) == len(rows) > 0:
        raise source.error(
            Symptom.ZEROS, f"all {len(rows)} rows are {kinds}", different, "nothing that was captured"
        )
    if len(blank) and missing == "error":
        raise source.error(
            Symptom.ZERO_ROWS,
            f"{len(blank)} of {len(rows)} rows are {kinds} in all layers",
            different,
            f"{kinds}, the first in row {start + blank[0]}, the last in row {start + blank[-1]}",
        )

    refuse(Symptom.CONSTANT_LAYER, checks.find_constant(there, known, experts, mine, model.layers))
    refuse(Symptom.DUPLICATES, checks.find_twice(there, known, start))

    # An engine that reads its buffer too late gives rows of another token.
    copied = checks.copied_rows(there, known, experts, mine)
    if len(copied):
        first = copied[0]
        error = source.error(
            Symptom.STALE_ROWS,
            f"{len(copied)} rows are another token's in all layers, the first is row {start + first}",
            "routes that depend on the token",
            f"a copy, for token {int(mine[first])}",
        )
        if missing == "error":
            raise error
        _log.warning("%s. They are left without a route", error)
        there[copied] = 0
        known[copied] = False
    return RoutedExperts.of_checked(
        ids=torch.from_numpy(room),
        layers=model.layers,
        num_experts=experts,
        recorded=torch.from_numpy(recorded),
        fingerprint=fingerprint(ids),
        weight_version=arguments.weight_version(weight_version),
        constant_layers_ok=True,
        from_engine=True,
    )


def _routed_rows(
    rows: Any, model: RoutedModel, tokens: int, start: int, ended: bool, surplus: int, source: Source
) -> Array:
    """Return the rows of the tokens, in the columns of the MoE layers; refuse another number of either."""
    if not checks.is_ids(rows):
        raise not_ids(source, rows)
    if not 0 <= start <= tokens:
        raise source.error(
            Symptom.SHAPE, "the first row's token isn't in the sequence", f"0 to {tokens}", start
        )
    # One row more or less would shift them all unnoticed. An aborted request may have none.
    wanted = max(0, tokens - 1 - start + surplus)
    if len(rows) != wanted and (len(rows) or ended):
        taken_off = f", and {surplus} more that were taken off its end" if surplus else ""
        few = len(rows) < wanted
        symptom = Symptom.TOO_FEW_ROWS if few else Symptom.TOO_MANY_ROWS
        raise source.error(
            symptom,
            f"the engine has rows for {'fewer' if few else 'more'} tokens than it ran",
            f"{wanted} rows ({tokens} tokens from {start} on{taken_off}; the last has none)",
            len(rows),
        )
    if not any(rows.shape):  # a list without rows, which doesn't tell the other sizes
        return np.zeros((0, len(model.layers), model.topk), rows.dtype)
    rows = rows[: tokens - start]  # the others are of tokens that were taken off; the last one left ran, too
    columns, topk = rows.shape[1:]
    if topk != model.topk:
        raise source.error(Symptom.TOPK, "the engine's top-k isn't the model's", f"{model.topk} ids", topk)
    wanted_columns = model.routed_columns(columns)
    if wanted_columns is None:
        raise source.error(
            Symptom.COLUMNS,
            "the engine's columns are neither all decoder layers nor the MoE layers",
            f"{model.num_layers}" + (f", or {len(model.sparse)}" if model.dense else ""),
            columns,
        )
    routed: Array = rows[:, wanted_columns]
    if columns == model.num_layers:
        _check_dense(rows, model, start, source)
    return routed


def _check_dense(rows: Array, model: RoutedModel, start: int, source: Source) -> None:
    """Refuse ids, [n, decoder layers, topk], in the columns of dense layers: the labels have shifted."""
    dense = rows[:, list(model.dense)]
    if dense.any():
        routed = rows[:, model.routed_columns(rows.shape[1])]
        for places in checks.rows_without_route(routed, model.num_experts).values():
            dense[places] = 0  # a filled row is filled in all columns
    if dense.any():
        row, column, _ = np.argwhere(dense)[0]
        raise source.error(
            Symptom.DENSE_COLUMN,
            "a dense layer has experts",
            "zeros in the columns of dense layers",
            f"{dense[row, column].tolist()} in row {start + row}",
            where=f"layer {model.dense[column]}",
        )


def from_batch(
    rows: torch.Tensor,
    model: RoutedModel,
    *,
    keep: torch.Tensor | None = None,
    zeros_are_none: bool | Array,
    tokens: Array | None = None,
    from_engine: bool = True,
) -> RoutedExperts:
    """Check and label the rows of a route tensor that a framework put into its batch.

    Args:
        rows: integers [tokens, columns, topk]; the columns are all decoder layers, or the MoE layers. A row
            of -1 in all MoE layers is a token without a route; dense layers may hold -1, too.
        keep: bool [tokens], the rows that have a route; all when not given.
        zeros_are_none: a row of zeros in all MoE layers has no route, nor has an engine's row of consecutive
            ids, with which some frameworks pad; or bool [tokens], which of them.
        tokens: [tokens], their ids; without them each counts as another when a layer is constant.
        from_engine: False if a trainer's own routers chose; then a layer may be the same for every token.
    """
    count = rows.shape[-2]
    columns = model.routed_columns(count)
    if columns is None:
        raise MicroBatchError(
            "the routes have another number of layers than the model",
            expected=f"{model.num_layers}, one a decoder layer, or {len(model.sparse)}, one a MoE layer",
            got=count,
            cause="an engine that counts multi-token prediction as a layer, or the config of another model",
        )
    rows = rows.detach().cpu()
    if model.dense and count == model.num_layers:
        # An engine's labels may have shifted: then its dense layers have experts.
        wide = rows.to(torch.int64)
        _check_dense(wide.where(wide != -1, 0).numpy(), model, 0, Source(engine=""))
    ids = arguments.ids(rows[:, columns])
    batch_ids = ids.numpy()
    recorded = (
        np.ones(len(batch_ids), np.bool_) if keep is None else keep.detach().cpu().bool().numpy().copy()
    )
    recorded[checks.blank_rows(batch_ids, -1)] = False
    blank = checks.blank_rows(batch_ids)
    if from_engine:
        filled = checks.rows_without_route(batch_ids, model.num_experts).get("consecutive ids", blank[:0])
        blank = np.concatenate([blank, filled])
    recorded[blank[np.broadcast_to(zeros_are_none, len(ids))[blank]]] = False
    return RoutedExperts(
        ids=ids,
        layers=model.layers,
        num_experts=model.num_experts,
        recorded=recorded,
        constant_layers_ok=not from_engine,
        from_engine=from_engine,
    ).check_not_constant(tokens)
