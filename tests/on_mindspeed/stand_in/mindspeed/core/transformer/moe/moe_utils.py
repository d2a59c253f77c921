"""fix_router's top-k: its answer is thrown away."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.args_utils import get_full_args


def topk_softmax_with_capacity(
    logits: torch.Tensor, topk: int, *_: Any, **__: Any
) -> tuple[torch.Tensor, ...]:
    """The top-k of a softmax; under fix_router with the experts 0, 1, 2, ... in turn in its place."""
    probs, chosen = torch.topk(torch.softmax(logits, dim=-1, dtype=torch.float32), topk, dim=1)
    if get_full_args().fix_router:
        chosen = torch.arange(chosen.numel(), device=chosen.device).view(chosen.shape) % logits.shape[-1]
    gates = torch.zeros_like(logits).scatter(1, chosen, probs.type_as(logits))
    routing_map = torch.zeros_like(logits).int().scatter(1, chosen, 1).bool()
    return gates, routing_map, routing_map.sum(dim=0)
