"""DeepEP's two kernels, played by gloo: Megatron's flex dispatcher runs on them where there is no DeepEP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

Dispatched = list[tuple[torch.Tensor, torch.Tensor]]
"""The expert ids and the probabilities, [tokens, topk], of each call that wasn't a recompute."""


@contextmanager
def lent() -> Iterator[Dispatched]:
    """Megatron's flex dispatcher finds kernels for the length of the block; yields what it gave them."""
    from megatron.core.transformer.moe import token_dispatcher

    seen: Dispatched = []

    def dispatch(x: torch.Tensor, ids: torch.Tensor, chances: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            seen.append((ids.detach().clone(), chances.detach().clone()))
        return fused_dispatch(x, ids, chances, *args, **kwargs)

    ours = {
        "fused_dispatch": dispatch,
        "fused_combine": fused_combine,
        "set_deepep_num_sms": lambda *_: None,
    }
    theirs = {name: vars(token_dispatcher)[name] for name in ours if name in vars(token_dispatcher)}
    try:
        for name in theirs:
            setattr(token_dispatcher, name, ours[name])
        yield seen
    finally:
        for name, value in theirs.items():
            setattr(token_dispatcher, name, value)


def fused_dispatch(
    x: torch.Tensor, ids: torch.Tensor, chances: torch.Tensor, experts: int, group: Any, **_: Any
) -> Any:
    """Send each token [tokens, hidden] once to every rank that has one of its experts `ids` [tokens, topk].

    Returns tokens, local expert ids (-1 for another rank's), probabilities, tokens of each local expert, and
    what `fused_combine` needs to know.
    """
    from megatron.core.tensor_parallel import all_to_all

    here = experts // group.size()
    owner = torch.where(ids >= 0, ids // here, -1)
    rows = [(owner == rank).any(1).nonzero()[:, 0] for rank in range(group.size())]
    mine = torch.cat([owner[row] == rank for rank, row in enumerate(rows)])
    local = torch.cat([ids[row] - rank * here for rank, row in enumerate(rows)]).masked_fill(~mine, -1)
    row = torch.cat(rows)
    sent = torch.tensor([len(one) for one in rows])
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    splits = received.tolist(), sent.tolist()
    arrived = all_to_all(group, local, *splits)
    return (
        all_to_all(group, x[row], *splits),
        arrived,
        all_to_all(group, chances[row] * mine, *splits),
        arrived[arrived >= 0].bincount(minlength=here),
        (row, splits, len(x)),
    )


def fused_combine(x: torch.Tensor, group: Any, handle: Any, **_: Any) -> tuple[torch.Tensor, None]:
    """Bring the experts' output [received, hidden] back and add up what belongs to the same token."""
    from megatron.core.tensor_parallel import all_to_all

    row, (received, sent), tokens = handle
    back = all_to_all(group, x, sent, received)
    return x.new_zeros(tokens, x.shape[1]).index_add(0, row, back), None
