"""fix_router: the top-k's answer is thrown away. Older branches replace the function, newer ones wrap two."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from mindspeed.args_utils import get_full_args


def topk_softmax_with_capacity(
    logits: torch.Tensor, topk: int, *_: Any, **__: Any
) -> tuple[torch.Tensor, ...]:
    """The top-k of a softmax; under fix_router with the experts 0, 1, 2, ... in turn in its place."""
    probs, chosen = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), topk, dim=1)
    if get_full_args().fix_router:
        chosen = _in_turn(logits, topk)
    gates = torch.zeros_like(logits).scatter(1, chosen, probs.type_as(logits))
    routing_map = torch.zeros_like(logits).int().scatter(1, chosen, 1).bool()
    return gates, routing_map, routing_map.sum(dim=0)


def topk_routing_with_score_function_wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    """The probabilities of the choice, at the experts in turn."""

    @wraps(function)
    def wrapper(logits: torch.Tensor, topk: int, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        dense = kwargs.pop("dense_output", False)
        probs, _ = function(logits, topk, *args, **kwargs, dense_output=True)
        chosen = _in_turn(logits, topk)
        if dense:
            return probs, chosen
        return torch.zeros_like(logits).scatter(1, chosen, probs), _map_of(chosen, logits)

    return wrapper


def compute_routing_scores_for_aux_loss_wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same for what the aux loss counts."""

    @wraps(function)
    def wrapper(logits: torch.Tensor, topk: int, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        routing_map, scores = function(logits, topk, *args, **kwargs)
        kept = routing_map.any(dim=1, keepdim=True)  # rows that a padding mask removed stay so
        return _map_of(_in_turn(logits, topk), logits) & kept, scores

    return wrapper


def _in_turn(logits: torch.Tensor, topk: int) -> torch.Tensor:
    rows, experts = logits.shape
    return torch.arange(rows * topk, device=logits.device).view(rows, topk) % experts


def _map_of(ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like, dtype=torch.bool).scatter(1, ids, True)
