"""moe_router_score_reuse: while training with an aux loss, the scores are computed once for routing and loss.

With a softmax before the top-k they share the map as well, unless something else than the scores decides. The
other cases are left to the function that is wrapped, where the original computes what that does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

Routing = tuple[torch.Tensor, torch.Tensor]


def router_score_reuse_wrapper(routing: Callable[..., Routing]) -> Callable[..., Routing]:
    """TopKRouter.routing."""

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
