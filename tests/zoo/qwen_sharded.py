"""The small Qwen3-MoE of the jobs in verl and ROLL, and by hooks of our own what its routers did.

No two tokens of a batch have the same id, so what a forward is fed says which token sits in which row.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import transformers
from torch import nn

from zoo import qwen
from zoo.outcome import changed
from zoo.qwen import TOPK

VOCAB = 128
MOE = (1, 0, 1, 1)
"""Of each decoder layer: has it experts?"""
LABELS = [layer for layer, sparse in enumerate(MOE) if sparse]


def save_model(folder: str, *, dense: bool = False, **changes: Any) -> str:
    """A checkpoint with a tokenizer, the same on all ranks; where it is."""
    if dist.get_rank() == 0:
        without = [layer for layer, sparse in enumerate(MOE) if dense or not sparse]
        qwen.make(VOCAB, len(MOE), seed=3, mlp_only_layers=without, **changes).save_pretrained(folder)
        qwen.tokenizer(map(str, range(VOCAB)), pad_token="0").save_pretrained(folder)
    dist.barrier()
    return folder


def routers(model: nn.Module) -> dict[int, nn.Module]:
    """By decoder layer."""
    return {
        int(name.split("layers.")[1].split(".")[0]): module
        for name, module in model.named_modules()
        if name.endswith("mlp.gate") and hasattr(module, "weight")
    }


def block_of(model: nn.Module, router: nn.Module) -> nn.Module:
    """The block that a router is in."""
    return next(module for module in model.modules() if router in module.children())


def other_routers(*models: nn.Module) -> AbstractContextManager[None]:
    """Routers that choose otherwise, for the length of the block."""
    each = [(layer, router.weight) for model in models for layer, router in routers(model).items()]
    assert each
    return changed(each)


def whole(tensor: Any) -> torch.Tensor:
    """All of a sharded tensor, on every rank."""
    full: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().clone()


# What the routers did


@dataclass
class Call:
    """One call of one router, forward or recompute.

    Attributes:
        tokens: the token in each row, by its id; 0 for padding.
        ids: [rows, topk].
    """

    layer: int
    tokens: torch.Tensor
    ids: torch.Tensor


@contextmanager
def witnessed(model: nn.Module) -> Iterator[list[Call]]:
    """Every call of the routers, with what the model was fed.

    A router of transformers 5 returns the ids. A block of 4 gives them to `one_hot`, verl's for an NPU to its
    kernel. A recompute runs in its micro-batch's backward, before the next forward: what was fed last is its.
    """
    calls: list[Call] = []
    fed: list[torch.Tensor] = []
    running: list[int] = []  # a recompute that stops early never ends its last block

    def fed_with(_: nn.Module, args: Any, __: Any) -> None:
        fed[:] = [args[0].detach().clone().reshape(-1)]

    def begins(layer: int, *_: Any) -> None:
        running[:] = [layer]

    def chose(ids: torch.Tensor) -> None:
        calls.append(Call(running[0], fed[0], ids.detach().long().clone().reshape(len(fed[0]), TOPK)))

    embedding = next(module for module in model.modules() if isinstance(module, nn.Embedding))
    handles = [embedding.register_forward_hook(fed_with)]
    owner, name, place = _consumer()
    for layer, router in routers(model).items():
        handles.append(block_of(model, router).register_forward_pre_hook(partial(begins, layer)))
        if transformers.__version__ >= "5" and owner is nn.functional:
            handles.append(router.register_forward_hook(lambda _, __, output: chose(output[2])))
            name = ""
    native = getattr(owner, name, None)

    def consumed(*args: Any, **kwargs: Any) -> Any:
        chose(args[place])
        return native(*args, **kwargs)  # type: ignore[misc]

    try:
        with mock.patch.object(owner, name, consumed) if name else nullcontext():
            yield calls
    finally:
        for handle in handles:
            handle.remove()


def _consumer() -> tuple[Any, str, int]:
    """Where a block's ids go: the function, and which argument they are."""
    if "torch_npu" in sys.modules:
        return sys.modules["torch_npu"], "npu_moe_token_permute", 1
    return nn.functional, "one_hot", 0


def check(
    calls: Sequence[Call], known: Mapping[int, torch.Tensor], columns: Sequence[int], times: int, replica: int
) -> None:
    """Each token of a replica went to these experts, in each layer and call; so often in all.

    Args:
        calls: of this rank's routers.
        known: by token, [layers, topk]. A row of zeros has no route: it took two experts of the router's own
            choice.
        columns: the decoder layers in it.
        times: how often a layer sees a token: once a forward, and once more if that is recomputed.
        replica: this rank's.
    """
    seen: Counter[tuple[int, int]] = Counter()
    for call in calls:
        for token, ids in zip(call.tokens.tolist(), call.ids.tolist(), strict=True):
            if not token:
                continue
            seen[call.layer, token] += 1
            row = known[token]
            wanted = sorted(row[columns.index(call.layer)].tolist()) if row.any() else sorted({*ids})
            assert sorted(ids) == wanted, f"token {token} in layer {call.layer}"
            assert len({*ids}) == TOPK
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (replica, seen))
    of_replica = sum((counts for rank, counts in everyones if rank == replica), Counter())
    assert of_replica == Counter({(layer, token): times for layer in LABELS for token in known})


def columns_of(layers: int) -> list[int]:
    """The decoder layers in routes of so many: those with experts, or all."""
    return LABELS if layers == len(LABELS) else list(range(len(MOE)))


def share_of_others(calls: Sequence[Call], known: Mapping[int, torch.Tensor]) -> float:
    """In how many of a rank's token-layers another set of experts was chosen than in R2's routes."""
    others = [
        sorted(ids) != sorted(known[token][LABELS.index(call.layer)].tolist())
        for call in calls
        for token, ids in zip(call.tokens.tolist(), call.ids.tolist(), strict=True)
        if token
    ]
    return sum(others) / len(others)


def check_told(lines: list[str], mode: str, share: str) -> None:
    """The line for an operator was logged once, on rank 0, and says what replay is on, too."""
    world = dist.get_world_size()
    ranks = "1 rank" if world == 1 else f"{world} ranks agree"
    line = (
        f"[npu_replay] {mode}: 3 routers, 3 replayed, {share} of rows had a route, {ranks} "
        f"(transformers {transformers.__version__}, FSDP2)"
    )
    assert lines == [line] * (dist.get_rank() == 0)
