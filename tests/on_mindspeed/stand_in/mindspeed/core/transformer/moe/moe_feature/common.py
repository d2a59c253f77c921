"""moe_tp_extend_ep's routing: older than Megatron's, and without score function, bias, groups and scaling."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import (
    _split_along_first_dim,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.moe import moe_utils


def routing_tp_extend_ep(self: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Route all tokens of the tensor-parallel group, and keep this rank's share of the result."""
    logits = self.apply_z_loss(logits.view(-1, self.config.num_moe_experts))
    logits = gather_from_sequence_parallel_region(logits)
    if self.routing_type == "aux_loss":
        scores, routing_map = self.aux_loss_load_balancing(logits)
    elif self.routing_type == "sinkhorn":
        scores, routing_map = self.sinkhorn_load_balancing(logits)
    elif self.routing_type == "none":
        scores, routing_map, _ = _topk(
            logits,
            self.topk,
            capacity_factor=self.config.moe_expert_capacity_factor,
            pad_to_capacity=self.config.moe_pad_expert_input_to_capacity,
            drop_policy=self.config.moe_token_drop_policy,
            use_pre_softmax=self.config.moe_router_pre_softmax,
            deterministic_mode=self.config.deterministic_mode,
        )
    else:
        raise ValueError(f"Unsupported MoE routing type: {self.routing_type}")
    return _split_along_first_dim(scores), _split_along_first_dim(routing_map)


# Its own import of the function: who replaces the router module's doesn't reach it.
_topk = getattr(moe_utils, "topk_softmax_with_capacity", None)
