"""What a model's run gave, and how two runs are compared: the same for every family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import npu_replay
from npu_replay import RoutedExperts

Grads = list[torch.Tensor | None]


def gradients(model: nn.Module) -> Grads:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def same(value: Any, other: Any) -> bool:
    """Are these losses and gradients, in lists however deep, equal to the last bit?"""
    if isinstance(value, (list, tuple)):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, torch.Tensor):
        return other is not None and torch.equal(value, other)
    return bool(value == other)


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


@contextmanager
def changed(weights: Iterable[tuple[int, Any]], scale: float = 1.0) -> Iterator[None]:
    """These weights have noise on them, each by its seed, for the length of the block."""
    kept = []
    with torch.no_grad():
        for seed, weight in weights:
            kept.append((weight, weight.detach().clone()))
            noise = scale * torch.randn(tuple(weight.shape), generator=torch.Generator().manual_seed(seed))
            if hasattr(weight, "device_mesh"):
                from torch.distributed.tensor import distribute_tensor

                noise = distribute_tensor(noise, weight.device_mesh, weight.placements)
            weight.add_(noise.to(weight.device))
    try:
        yield
    finally:
        with torch.no_grad():
            for weight, original in kept:
                weight.copy_(original)


def checkpointed(forward: Callable[..., Any], *, reentrant: bool) -> Callable[..., Any]:
    """A layer's forward in a checkpoint, whose input are the hidden states alone."""

    def run(*args: Any, **kwargs: Any) -> Any:
        hidden = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
        return checkpoint(
            lambda hidden: forward(hidden, *args[1:], **kwargs), hidden, use_reentrant=reentrant
        )

    return run


def in_thread(work: Callable[[], object]) -> None:
    """Run in a second thread, as a CUDA or NPU device thread runs backward; pass its exception on."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result()


def random_routes(
    rows: Iterable[int], layers: Sequence[int], experts: int, topk: int, seed: int, **more: Any
) -> list[RoutedExperts]:
    """Routes that no router would choose, one another for each micro-batch of so many rows."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.rand(count, len(layers), experts, generator=generator).topk(topk).indices for count in rows]
    return [RoutedExperts(ids=micro_batch, layers=layers, num_experts=experts, **more) for micro_batch in ids]


def check_own_record(model: nn.Module, run: Callable[[], Any]) -> list[RoutedExperts]:
    """Record leaves everything bit-equal to an untouched run, and a replay of it, too; return its routes."""
    untouched = run()
    others = hooks(model)  # transformers hangs some of its own on in a first run
    with npu_replay.record(model) as recording:
        assert same(run(), untouched)
    with npu_replay.replay(model, recording.routes):
        assert same(run(), untouched)
    assert hooks(model) == others
    return recording.routes


def check_foreign_routes(
    model: nn.Module,
    run: Callable[[], Any],
    plain: nn.Module,
    run_plain: Callable[[], Any],
    foreign: list[RoutedExperts],
    *,
    drops: bool = False,
) -> Any:
    """Routes of nobody's choice are shown, and give with `model`'s recompute what `plain` has without; return
    that. With `drops` some are lost to a capacity."""
    with npu_replay.observe(plain) as seen, npu_replay.replay(plain, foreign):
        expected = run_plain()
    assert drops or npu_replay.compare(seen.shown, foreign).differing == 0
    with npu_replay.replay(model, foreign):
        assert same(run(), expected)
    return expected


def as_map(ids: torch.Tensor, experts: int) -> torch.Tensor:
    """Bool [rows, experts]: which experts a token goes to, of ids [rows, topk]."""
    return torch.zeros(len(ids), experts, dtype=torch.bool).scatter(1, ids.detach().cpu().long(), True)


def same_experts(routes: RoutedExperts, layer: int, shown: torch.Tensor) -> bool:
    """Did the router of this layer send each token where these routes do? `shown` is bool [rows, experts]."""
    return torch.equal(as_map(routes.layer_ids(layer), routes.num_experts), shown.cpu())
