"""Rows of the route tensors that frameworks put into their batches, as RoutedExperts."""

from __future__ import annotations

import numpy as np
import torch

from npu_replay.errors import MicroBatchError
from npu_replay.rollout.admit import check_dense
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes import arguments
from npu_replay.routes.checks import Array, blank_rows
from npu_replay.routes.routed_experts import RoutedExperts


def from_batch(
    rows: torch.Tensor,
    model: RoutedModel,
    *,
    keep: torch.Tensor | None = None,
    zeros_are_none: bool | Array,
    tokens: Array | None = None,
    from_engine: bool = True,
) -> RoutedExperts:
    """Rows of ids, checked and labelled.

    Args:
        rows: integers [tokens, columns, topk]; the columns are all decoder layers, or the MoE layers. A row
            of -1 in all MoE layers is a token without a route; dense layers may hold -1, too.
        keep: bool [tokens], the rows that have a route; all when not given.
        zeros_are_none: is a row of zeros in all MoE layers a token without a route, too? Or where, bool
            [tokens].
        tokens: [tokens], their ids; without them each counts as another where a layer is the same throughout.
        from_engine: False where a trainer's own routers chose; then a layer may be the same for every token.

    Raises:
        MicroBatchError: columns that are neither.
        InvalidRoutes: ids in the column of a dense layer, out of range, twice in a row; the same for every
            token of a layer.
    """
    count = rows.shape[-2]
    columns = model.routed_columns(count)
    if columns is None:
        raise MicroBatchError(
            "the routes have another number of layers than the model",
            expected=f"{model.num_layers} columns, one a decoder layer, or {len(model.sparse)}, one a MoE "
            "layer",
            got=count,
            cause="an engine that counts multi-token prediction as a layer, or another model than the "
            "trainer's",
        )
    rows = rows.detach().cpu()
    if model.dense and count == model.num_layers:
        # An engine's labels may have shifted: then its dense layers have experts.
        wide = rows.to(torch.int64)
        check_dense(wide.where(wide != -1, 0).numpy(), model)
    ids = rows[:, columns]
    ids = ids.to(torch.int64) if ids.dtype in (torch.uint16, torch.uint32, torch.uint64) else ids
    given = arguments.ids(ids).numpy()
    recorded = np.ones(len(given), np.bool_) if keep is None else keep.detach().cpu().bool().numpy().copy()
    recorded[blank_rows(given, -1)] = False
    zeros = blank_rows(given)
    recorded[zeros[np.broadcast_to(zeros_are_none, len(ids))[zeros]]] = False
    return RoutedExperts(
        ids=ids,
        layers=model.layers,
        num_experts=model.num_experts,
        recorded=recorded,
        constant_layers_ok=not from_engine,
        from_engine=from_engine,
    ).check_not_constant(tokens)
