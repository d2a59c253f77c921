"""The layer of the alltoall_seq dispatcher: a custom autograd Function, in it a router with grad enabled."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.core.transformer.moe.moe_feature.overlap.moe_common import backward_steps, forward_func
from mindspeed.core.transformer.moe.moe_feature.parts import compute


class MoELayerOverlapAllToAllSeq(torch.autograd.Function):
    """Forward keeps its own pieces of graph; backward runs them one after the other."""

    @staticmethod
    def forward(ctx: Any, hidden_states: torch.Tensor, config: Any, moe_layer: Any) -> Any:
        hidden_states = hidden_states.detach().requires_grad_()
        with torch.enable_grad():
            scores, routing_map = moe_layer.router(hidden_states)

        def experts(hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
            return compute(moe_layer, hidden, probs, routing_map)

        output, hidden_states, detached_scores = forward_func(experts, (hidden_states, scores))
        ctx.save_for_backward(hidden_states, scores, detached_scores, output)
        return output.detach(), None

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return backward_steps(ctx, grads[0]), None, None
