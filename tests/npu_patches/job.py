"""A small Qwen3-MoE whose block is what a framework makes of it on an NPU, in a process of its own.

Operators are those of tests/stubs; blocks, attention and norms are the framework's and transformers' own.
What the experts get is read where they multiply: of each row which one, and which token it holds.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch

import npu_replay
from npu_replay import RoutedExperts
from zoo import qwen
from zoo.qwen import EXPERTS, TOPK

LAYERS = 3
CHECKPOINTS: dict[str, bool | None] = {"none": None, "non-reentrant": False, "reentrant": True}
Chosen = dict[int, list[torch.Tensor]]
"""By layer, of each call a table [rows, experts]: which experts multiplied this row."""


def _verl() -> None:
    module = importlib.import_module("verl.models.transformers.npu_patch")
    if hasattr(module, "apply_npu_patches"):  # from 0.9 on; before, the import is the patch
        module.apply_npu_patches()


def _ms_swift() -> None:
    """Its file of patches, without the packages around it, which import its whole trainer, and its logger."""
    root = find_spec("swift")
    assert root is not None
    for name in ("swift", "swift.model", "swift.model.npu_patch", "swift.utils", "swift.utils.logger"):
        package: Any = types.ModuleType(name)
        package.__path__ = [f"{root.submodule_search_locations[0]}/{name[6:].replace('.', '/')}"]  # type: ignore[index]
        package.get_logger = importlib.import_module("logging").getLogger
        sys.modules[name] = package
    importlib.import_module("swift.model.npu_patch.model").apply_patch()


def _roll() -> None:
    """What `apply_fsdp2` does with `apply_expert_patch`, on transformers 4."""
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    module = importlib.import_module("roll.third_party.fsdp2.qwen3_moe_patch")
    Qwen3MoeSparseMoeBlock.forward = module.qwen3_moe_forward


PATCHES: dict[str, Callable[[], None]] = {"verl": _verl, "swift": _ms_swift, "roll": _roll}


def run(task: dict[str, Any]) -> dict[str, Any]:
    """What was found of one framework's block."""
    import torch_npu  # before what asks for it

    assert "stubs" in torch_npu.__file__
    stock = _trained(_model("none"))
    PATCHES[task["whose"]]()
    model = _model("none")
    with witnessed(model, task["whose"]) as own:
        plain = _trained(model)
    far = [float((tensor - other).abs().max()) for tensor, other in zip(plain, stock, strict=True)]
    results: dict[str, Any] = {"from stock": max(far), "block": model.model.layers[0].mlp.forward.__module__}
    for checkpoint in CHECKPOINTS:
        results[checkpoint] = _recorded_and_replayed(_model(checkpoint), task["whose"], own, plain)
    return results


def _recorded_and_replayed(
    model: Any, whose: str, own: Chosen, plain: list[torch.Tensor]
) -> dict[str, int | bool]:
    """Calls of blocks whose experts are others than recorded or given; and is a record bit-equal?"""
    with npu_replay.record(model) as recording:
        trained = _trained(model)
    routes = _foreign()
    with npu_replay.replay(model, routes), witnessed(model, whose) as seen:
        _trained(model)
    calls = sum(map(len, seen.values()))
    return {
        "bit-equal": all(torch.equal(a, b) for a, b in zip(trained, plain, strict=True)),
        "wrongly recorded": _differing(own, recording.routes, whose),
        "wrongly replayed": _differing(seen, routes, whose),
        "own choice is other": _differing(own, routes, whose),
        "calls": calls,
    }


def _differing(seen: Chosen, routes: list[RoutedExperts], whose: str) -> int:
    """Calls in which a row went elsewhere. A recompute takes the micro-batches from the last to the first."""
    wrong = 0
    first = int(whose == "roll")  # it gives row 0 to each expert that has none, too
    for layer, calls in seen.items():
        order = [*routes, *reversed(routes)][: len(calls)]
        for table, batch_routes in zip(calls, order, strict=True):
            wanted = torch.zeros_like(table).scatter(1, batch_routes.layer_ids(layer).long(), True)
            wrong += not torch.equal(table[first:], wanted[first:])
    return wrong


def _model(checkpoint: str) -> Any:
    # ms-swift tells apart the two axes of packed weights by the hidden size, which must not be both.
    model = qwen.make(vocabulary=64, layers=LAYERS, moe_intermediate_size=24).train()
    if CHECKPOINTS[checkpoint] is not None:
        model.gradient_checkpointing_enable({"use_reentrant": CHECKPOINTS[checkpoint]})
        model.enable_input_require_grads()
    return model


def _batches() -> list[torch.Tensor]:
    """Two micro-batches of two sequences; no two tokens of one are the same."""
    order = torch.randperm(60, generator=torch.Generator().manual_seed(1)) + 1
    return [order[:12].view(2, 6), order[20:38].view(2, 9)]


def _trained(model: Any) -> list[torch.Tensor]:
    """Losses, and the gradients of one backward over both micro-batches."""
    model.zero_grad()
    losses = [model(input_ids=batch, labels=batch, use_cache=False).loss for batch in _batches()]
    torch.stack(losses).sum().backward()
    # A stock expert without a token has no gradient, where stacked weights have zeros.
    return [*(loss.detach() for loss in losses), *(_gradient(weight) for weight in model.parameters())]


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()


def _foreign() -> list[RoutedExperts]:
    """Random routes of both micro-batches."""
    generator = torch.Generator().manual_seed(3)
    return [
        RoutedExperts(
            ids=torch.rand(batch.numel(), LAYERS, EXPERTS, generator=generator).topk(TOPK).indices,
            layers=range(LAYERS),
            num_experts=EXPERTS,
        )
        for batch in _batches()
    ]


# What the experts multiply


@contextmanager
def witnessed(model: Any, whose: str) -> Iterator[Chosen]:
    """Which rows of each block's input come to which expert: the first product of each call.

    The model keeps the hooks.
    """
    import torch_npu

    seen: Chosen = {layer: [] for layer in range(LAYERS)}
    now: list[torch.Tensor] = []  # the input of the block that has begun, and its table
    native = torch_npu.npu_grouped_matmul

    def begins(layer: int, hidden: torch.Tensor) -> None:
        rows = hidden.detach().flatten(0, -2)
        seen[layer].append(torch.zeros(len(rows), EXPERTS, dtype=torch.bool))
        now[:] = [rows, seen[layer][-1]]

    def takes(expert: int, inputs: torch.Tensor) -> None:
        rows, table = now
        for row in inputs.detach():
            table[(rows == row).all(dim=1), expert] = True

    def product(x: Any, weight: Any, **kwargs: Any) -> Any:
        if now:
            ends = torch_npu.operators.group_ends(kwargs["group_list"], kwargs.get("group_list_type", 0))
            for expert, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
                takes(expert, x[0][start:end])
            now.clear()
        return native(x, weight, **kwargs)

    for layer, decoder in enumerate(model.model.layers):
        decoder.mlp.register_forward_pre_hook(lambda _, args, n=layer: begins(n, args[0]))
        for n, expert in enumerate(decoder.mlp.experts if whose == "roll" else []):
            expert.register_forward_pre_hook(lambda _, args, n=n: takes(n, args[0]))
    torch_npu.npu_grouped_matmul = product
    yield seen
    torch_npu.npu_grouped_matmul = native
