"""The layers and the routing that features put in Megatron's place: of Megatron's own parts, on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import build_module


class MindSpeedGmmExperts(SequentialMLP):
    """moe_grouped_gemm's experts, on the CPU one after the other."""

    def __init__(self, num_local_experts: int, config: Any, *_: Any) -> None:
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(num_local_experts, config, linears)


class MindSpeedAlltoAllOverlapMoeLayerAdaptor(BaseMoELayer):
    """moe_alltoall_overlap_comm: router and experts inside a function of autograd's. No Megatron MoELayer."""

    def __init__(self, config: Any, submodules: Any, layer_number: int | None = None) -> None:
        super().__init__(config, layer_number)
        self.router = TopKRouter(config=config)
        self.experts = build_module(submodules.experts, self.num_local_experts, config)
        self.token_dispatcher = MoEAlltoAllTokenDispatcher(
            self.num_local_experts, self.local_expert_indices, config=config
        )

    def forward(self, hidden_states: torch.Tensor) -> Any:
        return _Overlapped.apply(hidden_states, self)


class _Overlapped(torch.autograd.Function):
    """A layer's forward keeps its own pieces of graph; backward runs them one after the other."""

    @staticmethod
    def forward(ctx: Any, hidden_states: torch.Tensor, layer: Any) -> Any:
        with torch.enable_grad():  # whatever the mode around it
            hidden_states = hidden_states.detach().requires_grad_()
            scores, routing_map = layer.router(hidden_states)
            detached_scores = scores.detach().requires_grad_()
            sent = layer.token_dispatcher.token_permutation(hidden_states, detached_scores, routing_map)
            rows, counts, weights = sent
            output, _ = layer.token_dispatcher.token_unpermutation(*layer.experts(rows, counts, weights))
        ctx.save_for_backward(hidden_states, scores, detached_scores, output)
        return output.detach(), None

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        hidden_states, scores, detached_scores, output = ctx.saved_tensors
        output.backward(grad)
        scores.backward(detached_scores.grad)
        return hidden_states.grad, None
