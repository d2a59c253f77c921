"""What MindSpeed's op builders compile against CANN and load, in plain torch."""

from __future__ import annotations

from typing import Any

import torch

from torch_npu.operators import group_ends, grouped_matmul, grouped_outer

Tensors = list[torch.Tensor]


def npu_gmm(
    x: Tensors, weight: Tensors, bias: Tensors, groups: Any, group_type: int, kind: int = 0
) -> Tensors:
    """group_type 0 splits rows, 2 the inner dimension (a weight's gradient)."""
    ends = group_ends(groups, kind)
    if group_type == 2:
        return [grouped_outer(x[0].t(), weight[0], ends)]
    return [grouped_matmul(x[0], weight[0], ends)]


def npu_gmm_backward(
    grad: Tensors, x: Tensors, weight: Tensors, groups: Any, kind: int = 0
) -> tuple[Tensors, Tensors, Tensors]:
    ends = group_ends(groups, kind)
    dx = grouped_matmul(grad[0], weight[0].transpose(1, 2), ends)
    return [dx], [grouped_outer(x[0], grad[0], ends)], []


def npu_groupmatmul_add_fp32(x: torch.Tensor, dy: torch.Tensor, groups: Any, grad: torch.Tensor) -> None:
    grad.add_(grouped_outer(x, dy, group_ends(groups)).view_as(grad))
