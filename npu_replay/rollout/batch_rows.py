"""Rows of the route tensors that frameworks put into their batches, as RoutedExperts."""

from __future__ import annotations

import torch

from npu_replay.errors import MicroBatchError
from npu_replay.rollout.admit import check_dense
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.checks import Array
from npu_replay.routes.routed_experts import RoutedExperts


def from_batch(
    rows: torch.Tensor,
    model: RoutedModel,
    *,
    keep: torch.Tensor | None = None,
    zeros_are_none: bool,
    tokens: Array | None = None,
    vouched: bool = False,
) -> RoutedExperts:
    """Rows of ids, checked and labelled.

    Args:
        rows: integers [tokens, columns, topk]; the columns are all decoder layers, or the MoE layers.
        keep: bool [tokens], the rows that have a route; all when not given.
        zeros_are_none: a row of zeros in all layers is a token that the engine gave no route.
        tokens: [tokens], their ids; without them each counts as another where a layer is the same throughout.
        vouched: a trainer's own routers chose; then a layer may be the same for every token.

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
        check_dense(rows.to(torch.int64).numpy(), model)
    ids = rows[:, columns]
    ids = ids.to(torch.int64) if ids.dtype == torch.uint16 else ids
    recorded = torch.ones(len(ids), dtype=torch.bool) if keep is None else keep.detach().cpu().bool()
    if zeros_are_none and ids.numel():
        recorded = recorded & (ids != 0).flatten(1).any(dim=1)
    built = RoutedExperts(ids=ids, layers=model.layers, num_experts=model.num_experts, recorded=recorded)
    built._about(vouched=vouched, from_engine=not vouched)
    return built.check_not_constant(tokens) if zeros_are_none else built
