"""The layers and the routing that features put in Megatron's place: of Megatron's own parts, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
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


Routing = tuple[torch.Tensor, torch.Tensor]


def router_score_reuse_wrapper(routing: Callable[..., Routing]) -> Callable[..., Routing]:
    """TopKRouter.routing with moe_router_score_reuse.

    While training with an aux loss, the scores are computed once for routing and loss. With a softmax before
    the top-k they share the map as well, unless something else than the scores decides. The other cases are
    left to the function that is wrapped, where the original computes what that does.
    """

    @wraps(routing)
    def wrapper(self: Any, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Routing:
        if not _is_shared(self):
            return routing(self, logits, padding_mask=padding_mask)
        logits = logits.view(-1, self.config.num_moe_experts)
        scores = torch.softmax(logits, dim=-1, dtype=torch.float32)
        if self.router_replay is None:
            _, ids = _top_k(scores, self.topk)
            routing_map = counted = _map_of(ids, logits)
        else:
            _, ids = self.router_replay.get_replay_topk(scores, self.topk, None, None, _top_k)
            routing_map = _map_of(ids, logits)
            counted = _map_of(_top_k(scores, self.topk).indices, logits)
        probs = torch.zeros_like(logits).scatter(1, ids, scores.gather(1, ids).type_as(logits))
        probs = self._apply_aux_loss(probs, scores, counted, with_padding_mask=False)
        return probs, routing_map

    return wrapper


def _is_shared(router: Any) -> bool:
    config = router.config
    alike = router.score_function == "softmax" and config.moe_router_pre_softmax
    others = config.moe_router_group_topk or router.expert_bias is not None
    return (
        router.training and torch.is_grad_enabled() and router.is_aux_loss_enabled() and alike and not others
    )


def _top_k(scores: torch.Tensor, topk: int, *_: Any, **__: Any) -> Any:
    return torch.topk(scores, k=topk, dim=1)


def _map_of(ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like, dtype=torch.bool).scatter(1, ids, True)
