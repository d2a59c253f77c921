"""Fused operators of MindSpeed's MoE layers and of blocks that are patched for an NPU, in plain torch.

Differentiable where the real one is. Written after CANN's own documentation of what they compute, for
dropless routing in which every token has the same number of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = [
    "_npu_moe_token_unpermute_with_routing_map",
    "npu_alltoallv_gmm",
    "npu_gmm_alltoallv",
    "npu_grouped_matmul",
    "npu_moe_token_permute",
    "npu_moe_token_permute_with_routing_map",
    "npu_moe_token_permute_with_routing_map_grad",
    "npu_moe_token_unpermute",
    "npu_moe_token_unpermute_with_routing_map",
    "npu_moe_token_unpermute_with_routing_map_grad",
    "npu_rms_norm",
    "npu_rotary_mul",
    "npu_swiglu",
]

Tensors = Sequence[torch.Tensor]


def npu_swiglu(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    gate, up = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * up


def npu_rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normed rows, and one over their root mean square."""
    scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + epsilon)
    return (x.float() * scale).to(x.dtype) * gamma, scale


def npu_rotary_mul(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def group_ends(groups: Any, kind: int = 0) -> list[int]:
    """Where each group of rows ends; `kind` 1: `groups` holds lengths and not ends."""
    values = torch.as_tensor(groups)
    return (values.cumsum(0) if kind == 1 else values).tolist()


def grouped_matmul(x: torch.Tensor, weight: torch.Tensor | Tensors, ends: list[int]) -> torch.Tensor:
    """Rows of a group by the group's matrix: [rows, k] and [groups, k, n] give [rows, n]."""
    starts = [0, *ends[:-1]]
    return torch.cat([x[a:b] @ weight[g] for g, (a, b) in enumerate(zip(starts, ends, strict=True))])


def grouped_outer(x: torch.Tensor, grad: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """Gradient of the groups' matrices: [rows, k] and [rows, n] give [groups, k, n]."""
    starts = [0, *ends[:-1]]
    return torch.stack([x[a:b].t() @ grad[a:b] for a, b in zip(starts, ends, strict=True)])


def npu_grouped_matmul(
    x: Tensors,
    weight: Tensors,
    *,
    bias: Any = None,
    group_list: Any = None,
    split_item: int = 0,
    group_type: int = 0,
    group_list_type: int = 0,
    **other: Any,
) -> list[torch.Tensor]:
    """group_type 0 splits rows, 2 the inner dimension (a weight's gradient). In the dtype that comes."""
    if bias or len(x) != 1 or {k for k, v in other.items() if v is not None}:
        raise RuntimeError("torch_npu stub: npu_grouped_matmul without bias and scales, for one x")
    ends = group_ends(group_list, group_list_type)
    with torch.autocast("cpu", enabled=False):
        if group_type == 2:
            return [grouped_outer(x[0].t(), weight[0], ends)]
        return [grouped_matmul(x[0], weight[0] if len(weight) == 1 else weight, ends)]


def npu_moe_token_permute(tokens: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows by expert, an expert's in the order of tokens; and where each of `indices` [tokens, topk] went.

    As of a kernel, no mode sees what it does.
    """
    with torch._C.DisableTorchFunction():
        order = indices.reshape(-1).argsort(stable=True)
        return tokens.index_select(0, order // indices.shape[1]), order.argsort().to(torch.int32)


def npu_moe_token_unpermute(
    permuted_tokens: torch.Tensor, sorted_indices: torch.Tensor, *, probs: torch.Tensor
) -> torch.Tensor:
    """Sum of a token's rows, each by its probability [tokens, topk]."""
    rows = permuted_tokens.index_select(0, sorted_indices).unflatten(0, probs.shape)
    return (rows * probs.unsqueeze(-1)).sum(1)


def npu_moe_token_permute_with_routing_map(
    tokens: torch.Tensor,
    routing_map: torch.Tensor,
    *,
    probs: torch.Tensor | None = None,
    num_out_tokens: int | None = None,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Rows by expert, an expert's in the order of tokens; and, by token, where its rows went."""
    if drop_and_pad:
        raise RuntimeError("torch_npu stub: token permute without drop_and_pad")
    experts, rows = routing_map.bool().t().nonzero(as_tuple=True)
    if num_out_tokens is not None and len(rows) != int(num_out_tokens):
        raise RuntimeError(f"torch_npu stub: {len(rows)} rows are routed, num_out_tokens is {num_out_tokens}")
    sorted_indices = rows.argsort(stable=True)
    permuted_probs = None if probs is None else probs.t()[experts, rows]
    return tokens.index_select(0, rows), permuted_probs, sorted_indices


def npu_moe_token_permute_with_routing_map_grad(
    grad: torch.Tensor,
    probs_grad: torch.Tensor | None,
    sorted_indices: torch.Tensor,
    routing_map: torch.Tensor,
    num_experts: int,
    num_tokens: int,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    experts, rows = routing_map.bool().t().nonzero(as_tuple=True)
    tokens = grad.new_zeros(num_tokens, grad.shape[-1]).index_add(0, rows, grad)
    if probs_grad is None:
        return tokens, None
    spread = probs_grad.new_zeros(num_experts, num_tokens).index_put((experts, rows), probs_grad)
    return tokens, spread.t()


def _npu_moe_token_unpermute_with_routing_map(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    restore_shape: Sequence[int],
    *,
    probs: torch.Tensor | None = None,
    routing_map: torch.Tensor | None = None,
    drop_and_pad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Sum of a token's rows, each by its probability. `sorted_indices` holds the rows by token."""
    if drop_and_pad:
        raise RuntimeError("torch_npu stub: token unpermute without drop_and_pad")
    rows = _tokens_of(sorted_indices, int(restore_shape[0]))
    weighed = permuted_tokens
    permuted_probs = None
    if probs is not None:
        assert routing_map is not None
        experts, by_expert = routing_map.bool().t().nonzero(as_tuple=True)
        permuted_probs = probs.t()[experts, by_expert]
        weighed = permuted_tokens * permuted_probs.unsqueeze(-1)
    summed = weighed.new_zeros(*restore_shape).index_add(0, rows, weighed)
    return summed.to(permuted_tokens.dtype), sorted_indices, sorted_indices, permuted_probs


def npu_moe_token_unpermute_with_routing_map(*args: Any, **kwargs: Any) -> torch.Tensor:
    return _npu_moe_token_unpermute_with_routing_map(*args, **kwargs)[0]


def npu_moe_token_unpermute_with_routing_map_grad(
    grad: torch.Tensor,
    out_index: torch.Tensor,
    permuted_token_id: torch.Tensor,
    routing_map: torch.Tensor | None = None,
    permuted_tokens: torch.Tensor | None = None,
    probs: torch.Tensor | None = None,
    drop_and_pad: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    rows = _tokens_of(out_index, len(grad))
    each = grad.index_select(0, rows)
    if probs is None:
        return each, None
    assert routing_map is not None
    assert permuted_tokens is not None
    experts, by_expert = routing_map.bool().t().nonzero(as_tuple=True)
    prob_grads = (each * permuted_tokens).sum(-1).to(probs.dtype)
    spread = torch.zeros_like(probs.t()).index_put((experts, by_expert), prob_grads)
    return each * probs.t()[experts, by_expert].unsqueeze(-1), spread.t()


def _tokens_of(sorted_indices: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The token of each permuted row: every token has as many rows as any other."""
    each = len(sorted_indices) // num_tokens
    tokens = torch.empty_like(sorted_indices)
    tokens[sorted_indices] = torch.arange(num_tokens).repeat_interleave(each)
    return tokens


def npu_alltoallv_gmm(
    *,
    gmm_x: torch.Tensor,
    gmm_weight: torch.Tensor,
    hcom: dist.ProcessGroup,
    ep_world_size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    **other: Any,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Rows to the ranks that have their experts, then each expert's matrix; also the rows as they came.

    `send_counts` and `recv_counts` hold, for each rank and each expert of a rank, how many rows.
    """
    _without_shared_experts(other)
    arrived = _exchanged(gmm_x, send_counts, recv_counts, hcom)
    order, ends = _by_expert(recv_counts, ep_world_size)
    rows = arrived[order]
    return grouped_matmul(rows, gmm_weight, ends), None, rows


def npu_gmm_alltoallv(
    *,
    gmm_x: torch.Tensor,
    gmm_weight: torch.Tensor,
    hcom: dist.ProcessGroup,
    ep_world_size: int,
    send_counts: Sequence[int],
    recv_counts: Sequence[int],
    **other: Any,
) -> tuple[torch.Tensor, None]:
    """Each expert's matrix, then the rows back to the ranks that they came from."""
    _without_shared_experts(other)
    order, ends = _by_expert(send_counts, ep_world_size)
    rows = torch.empty_like(order).scatter(0, order, torch.arange(len(order)))
    return _exchanged(grouped_matmul(gmm_x, gmm_weight, ends)[rows], send_counts, recv_counts, hcom), None


def _without_shared_experts(other: dict[str, Any]) -> None:
    if any(other.get(name) is not None for name in ("mm_x", "mm_weight", "send_counts_tensor")):
        raise RuntimeError("torch_npu stub: alltoallv with gmm without shared experts")


def _exchanged(
    rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: dist.ProcessGroup
) -> torch.Tensor:
    ranks = dist.get_world_size(group)
    sizes = [torch.tensor(counts).reshape(ranks, -1).sum(1).tolist() for counts in (receive, send)]
    arrived = rows.new_empty(sum(sizes[0]), rows.shape[-1])
    dist.all_to_all_single(arrived, rows.contiguous(), *sizes, group=group)
    return arrived


def _by_expert(counts: Sequence[int], ranks: int) -> tuple[torch.Tensor, list[int]]:
    """The order that puts rows by (rank, expert) into rows by expert, and where each expert's end."""
    each = torch.tensor(counts).reshape(ranks, -1)
    experts = torch.arange(each.shape[1]).repeat(ranks).repeat_interleave(each.reshape(-1))
    return experts.argsort(stable=True), each.sum(0).cumsum(0).tolist()
