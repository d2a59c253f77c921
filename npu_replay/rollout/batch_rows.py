"""Rows of the route tensors that frameworks put into their batches, as RoutedExperts."""

from __future__ import annotations

import torch

from npu_replay.errors import MicroBatchError
from npu_replay.rollout.admit import check_dense
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.routed_experts import RoutedExperts


def from_batch(
    rows: torch.Tensor, model: RoutedModel, *, keep: torch.Tensor | None = None, zeros_are_none: bool
) -> RoutedExperts:
    """Rows of ids, checked and labelled.

    Args:
        rows: integers [tokens, columns, topk]; the columns are all decoder layers, or the MoE layers.
        keep: bool [tokens], the rows that have a route; all when not given.
        zeros_are_none: a row of zeros in all layers is a token that the engine gave no route.

    Raises:
        MicroBatchError: columns that are neither.
        InvalidRoutes: ids in the column of a dense layer, out of range, twice in a row; the same for every
            token of a layer.
    """
    columns = _columns(rows.shape[-2], model)
    rows = rows.detach().cpu()
    if isinstance(columns, list) and len(columns) < model.num_layers:
        # An engine's labels may have shifted: then its dense layers have experts.
        check_dense(rows.to(torch.int64).numpy(), model)
    ids = rows[:, columns]
    ids = ids.to(torch.int64) if ids.dtype == torch.uint16 else ids
    recorded = torch.ones(len(ids), dtype=torch.bool) if keep is None else keep.detach().cpu().bool()
    if zeros_are_none and ids.numel():
        recorded = recorded & (ids != 0).flatten(1).any(dim=1)
    built = RoutedExperts(ids=ids, layers=model.layers, num_experts=model.num_experts, recorded=recorded)
    return built.check_not_constant() if zeros_are_none else built


def _columns(count: int, model: RoutedModel) -> slice | list[int]:
    """Which columns are the MoE layers."""
    if count == len(model.layers):
        return slice(None)
    if count == model.num_layers:
        return list(model.layers)
    raise MicroBatchError(
        "the routes have another number of layers than the model",
        expected=f"{model.num_layers} columns, one a decoder layer, or {len(model.layers)}, one a MoE layer",
        got=count,
        cause="an engine that counts multi-token prediction as a layer, or another model than the trainer's",
    )
