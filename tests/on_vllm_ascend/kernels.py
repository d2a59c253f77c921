"""The operators of the layers that need a device, in torch or without effect. Nothing else is replaced.

The gating operator chooses as its description says; the experts give zeros; what they gave isn't gathered.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch_npu


def moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    *,
    k_group: int = 1,
    group_count: int = 1,
    norm_type: int = 0,
    bias_opt: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """npu_moe_gating_top_k: softmax or sigmoid, a bias for the choice, the groups with the best two."""
    scores = x.float().sigmoid() if norm_type else x.float().softmax(-1)
    chosen_by = scores if bias_opt is None else scores + bias_opt
    if group_count > 1:
        groups = chosen_by.view(len(x), group_count, -1)
        best = groups.topk(2, -1).values.sum(-1).topk(k_group, -1).indices
        dropped = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
        chosen_by = groups.masked_fill(dropped.unsqueeze(-1), float("-inf")).view_as(scores)
    ids = chosen_by.topk(k, -1).indices
    return scores.gather(1, ids), ids.to(torch.int32), None


moved: list[int] = []
"""How many ids of each layer EPLB has put elsewhere."""


def replace() -> None:
    """In vllm-ascend, once it is imported."""
    from vllm_ascend.device.device_op import DeviceOperator
    from vllm_ascend.ops.fused_moe import moe_comm_method

    DeviceOperator.moe_gating_top_k = staticmethod(moe_gating_top_k)
    torch_npu.npu_moe_gating_top_k_softmax = moe_gating_top_k  # of 310P
    for name in ("npu_dynamic_quant", "npu_dynamic_mx_quant"):
        setattr(torch_npu, name, _quantized)

    def fused_experts(self: Any, fused_experts_input: Any, *_: Any, **__: Any) -> Any:
        # To 0.26 the places of experts are looked up behind the choice, in `fused_experts` itself.
        ids = fused_experts_input.topk_ids
        places = getattr(getattr(fused_experts_input, "routing", None), "log2phy", None)
        moved.append(0 if places is None else int((places[ids] != ids).sum()))
        return moe_comm_method.FusedExpertsResult(
            routed_out=torch.zeros_like(fused_experts_input.hidden_states),
            group_list_type=1,
            expert_tokens=torch.zeros(self.moe_config.num_local_experts, dtype=torch.int64),
        )

    def finalize(self: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return hidden_states

    base = moe_comm_method.MoECommMethod
    for method in (base, *base.__subclasses__()):
        method.fused_experts = fused_experts
        method.finalize = finalize


def _quantized(x: torch.Tensor, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x, torch.ones(len(x))


def packed_weights() -> Any:
    """While layers run, they have the weights that are packed for an NPU after loading: nobody reads them."""
    original = torch.nn.Module.__getattr__

    def get(self: Any, name: str) -> Any:
        try:
            return original(self, name)
        except AttributeError:
            if not name.startswith(("w13_", "w2_", "fused_w")):
                raise
            return torch.zeros(1)

    return mock.patch.object(torch.nn.Module, "__getattr__", get)
