"""moe-npu-fast-ops, on by default: permute, unpermute, the map and the layer's forward by other operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from mindspeed.args_utils import get_full_args

CONFLICTS = (
    *("moe_fb_overlap", "moe_alltoall_overlap_comm", "moe_allgather_overlap_comm", "moe_alltoall_mc2"),
    *("moe_tp_extend_ep", "moe_pad_expert_input_to_capacity"),
)
"""Arguments with which the feature stays off."""


def _is_on() -> bool:
    return bool(getattr(get_full_args(), "moe_npu_fast_ops", True))


def topk_routing_with_score_function_scatter_wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Ask for the dense answer, and scatter it."""

    @wraps(function)
    def wrapper(logits: torch.Tensor, topk: int, *args: Any, **kwargs: Any) -> Any:
        if not _is_on() or kwargs.get("fused") or kwargs.get("dense_output"):
            return function(logits, topk, *args, **kwargs)
        probs, ids = function(logits, topk, *args, **kwargs | {"dense_output": True})
        routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)
        return torch.zeros_like(logits).scatter(1, ids, probs), routing_map

    return wrapper


def permute_npu_wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's permute without a sort."""

    @wraps(function)
    def wrapper(
        tokens: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor | None = None, **kwargs: Any
    ) -> Any:
        others = ("fused", "drop_and_pad", "align_size")
        if not _is_on() or any(kwargs.get(name) for name in others):
            return function(tokens, routing_map, probs=probs, **kwargs)
        by_expert = routing_map.bool().T
        rows = by_expert.nonzero()[:, 1]
        weights = None if probs is None else probs.T.masked_select(by_expert)
        return tokens.index_select(0, rows), weights, rows, None, kwargs.get("tokens_per_expert")

    return wrapper


def unpermute_npu_wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's unpermute by scatter_add."""

    @wraps(function)
    def wrapper(
        permuted_tokens: torch.Tensor, sorted_indices: torch.Tensor, restore_shape: torch.Size, **kwargs: Any
    ) -> torch.Tensor:
        others = ("fused", "drop_and_pad")
        if not _is_on() or any(kwargs.get(name) for name in others) or kwargs.get("pad_offsets") is not None:
            return function(permuted_tokens, sorted_indices, restore_shape, **kwargs)
        if kwargs.get("probs") is not None:
            weights = kwargs["probs"].T.masked_select(kwargs["routing_map"].T)
            permuted_tokens = permuted_tokens * weights[:, None]
        rows = sorted_indices[:, None].expand(-1, restore_shape[-1])
        output = torch.zeros(restore_shape, dtype=permuted_tokens.dtype)
        return output.scatter_add(0, rows, permuted_tokens)

    return wrapper


def moe_forward_dispatch_lifetime_wrapper(forward: Callable[..., Any]) -> Callable[..., Any]:
    """MoELayer.forward in training, stage by stage, so that no local keeps what was sent to the experts."""

    @wraps(forward)
    def wrapper(
        self: Any, hidden_states: torch.Tensor, intermediate_tensors: Any = None, padding_mask: Any = None
    ) -> Any:
        if not _is_on() or not self.training or intermediate_tensors is not None:
            return forward(self, hidden_states, intermediate_tensors, padding_mask)
        padding = None if padding_mask is None else padding_mask.transpose(0, 1).bool()
        if not self.moe_layer_recompute:
            return _staged(self, hidden_states, padding)
        from megatron.core import tensor_parallel

        return tensor_parallel.checkpoint(
            lambda hidden, mask: _staged(self, hidden, mask), False, hidden_states, padding
        )

    return wrapper


def _staged(layer: Any, hidden: torch.Tensor, padding: torch.Tensor | None) -> Any:
    shared = layer.shared_experts_compute(hidden)
    probs, routing_map = layer.route(hidden, padding)
    hidden, probs = layer.dispatch(*layer.preprocess(hidden, probs, routing_map))
    hidden, counts, probs = layer.token_dispatcher.dispatch_postprocess(hidden, probs)
    hidden, bias = layer.experts(hidden, counts, probs)
    hidden = layer.combine(layer.token_dispatcher.combine_preprocess(hidden))
    return layer.postprocess(hidden, shared), bias
