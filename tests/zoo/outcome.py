"""What a model's run gave, and how two runs are compared: the same for every family."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from npu_replay import RoutedExperts

Grads = list[torch.Tensor | None]


def gradients(model: nn.Module) -> Grads:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(one: Any, other: Any) -> bool:
    """Are these losses and gradients, in lists however deep, equal to the last bit?"""
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        return other is not None and torch.equal(one, other)
    return bool(one == other)


def hooks(model: nn.Module) -> int:
    """How many hooks the model's modules have."""
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def backward(losses: Sequence[torch.Tensor], order: str) -> None:
    """Over the losses' sum ("sum", "thread"), or over each from the last one ("reversed")."""
    if order == "sum":
        sum(losses).backward()
    elif order == "reversed":
        for loss in reversed(losses):
            loss.backward()
    else:
        in_thread(lambda: sum(losses).backward())


def in_thread(work: Callable[[], object]) -> None:
    """Run in a second thread, as a CUDA or NPU device thread runs backward; pass its exception on."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


def random_routes(
    rows: Iterable[int], layers: Sequence[int], experts: int, topk: int, seed: int, **more: Any
) -> list[RoutedExperts]:
    """Routes that no router would choose, one another for each micro-batch of so many rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.rand(count, len(layers), experts, generator=generator).topk(topk).indices for count in rows]
    return [RoutedExperts(ids=one, layers=layers, num_experts=experts, **more) for one in ids]


def as_map(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Bool [rows, experts]: which experts a token goes to, of ids [rows, topk]."""
    return torch.zeros(len(ids), experts, dtype=torch.bool).scatter(1, ids.detach().cpu().long(), True)


def same_experts(routes: RoutedExperts, layer: int, shown: torch.Tensor) -> bool:
    """Did the router of this layer send each token where these routes do? `shown` is bool [rows, experts]."""
    return torch.equal(as_map(routes.layer_ids(layer), routes.num_experts), shown.cpu())
