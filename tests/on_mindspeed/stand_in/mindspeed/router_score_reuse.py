"""moe_router_score_reuse: while training with an aux loss, the scores are computed once for routing and loss.

With a softmax before the top-k they share the map as well, unless something else than the scores decides.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from megatron.core.transformer.moe import moe_utils

from mindspeed.args_utils import get_full_args

Routing = tuple[torch.Tensor, torch.Tensor]


def router_score_reuse_wrapper(routing: Callable[..., Routing]) -> Callable[..., Routing]:
    """TopKRouter.routing; everything but the shared case is left to the function that is wrapped."""

    @wraps(routing)
    def wrapper(self: Any, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> Routing:
        if not _is_shared(self, logits):
            return routing(self, logits, padding_mask=padding_mask)
        length, batch = logits.shape[:2]
        config = self.config
        padding = None if padding_mask is None else padding_mask.reshape(-1)
        logits = self.apply_z_loss(logits.view(-1, config.num_moe_experts), padding_mask=padding)
        scores = _scores(logits, self.score_function)
        probs, routing_map = _routed(self, logits, scores)
        scores, counted = _of_the_loss(self, scores, routing_map)
        if padding is not None:
            scores = scores * ~padding[:, None]
            counted = counted * ~padding[:, None]
        if config.moe_expert_capacity_factor is not None:
            probs, routing_map = moe_utils.apply_router_token_dropping(
                probs,
                routing_map,
                router_topk=self.topk,
                capacity_factor=config.moe_expert_capacity_factor,
                drop_policy=config.moe_token_drop_policy,
                pad_to_capacity=config.moe_pad_expert_input_to_capacity,
            )
        masked = {"with_padding_mask": padding is not None}
        probs = self._apply_aux_loss(probs, scores, counted, **masked)
        probs = self._apply_seq_aux_loss(probs, scores, counted, length, batch, **masked)
        probs = self._apply_global_aux_loss(probs, scores, counted, **masked)
        self._apply_expert_bias(routing_map, padding_mask=padding)
        return probs, routing_map

    return wrapper


def _is_shared(router: Any, logits: torch.Tensor) -> bool:
    before_top_k = router.score_function == "sigmoid" or (
        router.score_function == "softmax" and router.config.moe_router_pre_softmax
    )
    return (
        router.training
        and torch.is_grad_enabled()
        and router.is_aux_loss_enabled()
        and router.routing_type != "sinkhorn"
        and not router.config.moe_router_fusion
        and not get_full_args().moe_tp_extend_ep
        and logits.dtype in (torch.float32, torch.bfloat16)
        and before_top_k
    )


def _scores(logits: torch.Tensor, function: str) -> torch.Tensor:
    if function == "softmax":
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    return torch.sigmoid(logits.float())


def _routed(router: Any, logits: torch.Tensor, scores: torch.Tensor) -> Routing:
    config = router.config
    groups = (config.moe_router_num_groups, config.moe_router_group_topk)
    choosing = scores if router.expert_bias is None else scores + router.expert_bias.float()
    if router.router_replay is None:
        _, ids = _top_k(choosing, router.topk, *groups)
    else:
        _, ids = router.router_replay.get_replay_topk(choosing, router.topk, *groups, _top_k)
    weights = scores.gather(1, ids)
    if router.score_function == "sigmoid" and router.topk > 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    if config.moe_router_topk_scaling_factor:
        weights = weights * config.moe_router_topk_scaling_factor
    return torch.zeros_like(logits).scatter(1, ids, weights.type_as(logits)), _map_of(ids, logits)


def _top_k(
    scores: torch.Tensor, topk: int, num_groups: int | None = None, group_topk: int | None = None
) -> Any:
    if not group_topk:
        return torch.topk(scores, k=topk, dim=1)
    rows, experts = scores.shape
    return moe_utils.group_limited_topk(
        scores=scores,
        topk=topk,
        num_tokens=rows,
        num_experts=experts,
        num_groups=num_groups,
        group_topk=group_topk,
    )


def _of_the_loss(router: Any, scores: torch.Tensor, routing_map: torch.Tensor) -> Routing:
    """The scores and the map that the aux loss counts: the routing's own map where nothing else decides."""
    config = router.config
    if router.score_function == "sigmoid":
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    plain = config.moe_router_group_topk is None and router.expert_bias is None
    if router.score_function == "softmax" and plain and router.router_replay is None:
        return scores, routing_map
    return scores, _map_of(torch.topk(scores, k=router.topk, dim=1).indices, scores)


def _map_of(ids: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(like, dtype=torch.bool).scatter(1, ids, True)
