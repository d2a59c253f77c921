"""Hugging Face transformers (5 on): the router modules of its mixture-of-experts models."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from npu_replay.errors import NoEffect, RouterError
from npu_replay.routers import Router

_PACKAGE = "transformers."
_ROUTER_NAME = re.compile(r"(Router|Gate|Gating)$")
_BLOCK_NAME = re.compile(r"(MoE|Moe|MOE)(Block|Layer|FFN|MLP)?$|Sparse\w*(Block|MLP|MoE)$|FFN$")
_DECODER_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)(?:\.|$)")


class TransformersRouters:
    """Recognises router modules by what they are: a top-k, a number of experts, and a router's name."""

    def describe(self, module: nn.Module, path: str) -> Router | None:
        """Describe a router; refuse one that can't be replayed, by name."""
        kind = _vendor_class(module)
        if kind is None:
            return None
        if not _ROUTER_NAME.search(kind.__name__):
            _refuse_inner_routing(module, kind, path)
            return None
        topk, experts = _first_int(module, "top_k", "topk"), _first_int(module, "num_experts", "n_routed_experts")
        if topk is None or experts is None:
            raise RouterError(
                f"{kind.__name__} can't be replayed",
                where=path,
                expected="a router with a top-k and a number of experts of its own",
                got=f"top-k {topk}, experts {experts}",
                cause="a model family that npu_replay doesn't know yet (docs/models.md lists those it does)",
            )
        layer = _DECODER_LAYER.search(path)
        return Router(
            module=module,
            num_experts=experts,
            topk=topk,
            shows=_Shows(kind.__name__, experts, topk),
            layer=int(layer.group(1)) if layer else None,
            masks=_masks(module),
        )


class _Shows:
    """Reads the ids out of a router's output: the one integer tensor [rows, topk] in it."""

    def __init__(self, name: str, experts: int, topk: int) -> None:
        self._name = name
        self._experts = experts
        self._topk = topk

    def __call__(self, output: object) -> torch.Tensor:
        for value in output if isinstance(output, tuple) else (output,):
            if isinstance(value, torch.Tensor) and not value.dtype.is_floating_point and value.dim() >= 2:
                ids = value.reshape(-1, value.shape[-1])
                if ids.shape[1] == self._topk:
                    shown = torch.zeros(len(ids), self._experts, dtype=torch.bool, device=ids.device)
                    return shown.scatter(1, ids.long(), True)
        raise NoEffect(
            f"{self._name} can't be replayed: its output doesn't show which experts it chose",
            expected=f"an integer tensor [rows, {self._topk}] in the output",
            got=_describe(output),
            cause="a model family that npu_replay doesn't know yet (docs/models.md lists those it does)",
        )


def _vendor_class(module: nn.Module) -> type | None:
    """The transformers class that a module is or derives from."""
    for kind in type(module).__mro__:
        if kind.__module__.startswith(_PACKAGE + "models."):
            return kind
    return None


def _refuse_inner_routing(module: nn.Module, kind: type, path: str) -> None:
    """Blocks that hold their top-k inline: transformers 4, and a few families still."""
    topk = _first_int(module, "top_k", "topk", "moe_top_k")
    inner = any(_is_router(child) for child in module.modules())
    if topk is None or inner or not _BLOCK_NAME.search(kind.__name__):
        return
    raise RouterError(
        f"{kind.__name__} can't be replayed: it chooses its experts inside the block, which shows no ids",
        where=path,
        expected="a router module of its own",
        got=f"{kind.__module__}.{kind.__name__}",
        cause="transformers 4, where most families have no router module (5 gives them one), or a family that "
        "npu_replay can't replay",
    )


def _is_router(module: nn.Module) -> bool:
    kind = _vendor_class(module)
    return kind is not None and bool(_ROUTER_NAME.search(kind.__name__))


def _masks(module: nn.Module) -> bool:
    """Group-limited routing masks the scores of other groups; a router with one group masks nothing."""
    groups = _first_int(module, "num_group", "n_group", "num_expert_groups")
    return groups is not None and groups > 1


def _first_int(module: Any, *names: str) -> int | None:
    for name in names:
        value = getattr(module, name, None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return None


def _describe(output: object) -> str:
    if isinstance(output, torch.Tensor):
        return f"{str(output.dtype).removeprefix('torch.')} {list(output.shape)}"
    if isinstance(output, tuple):
        return ", ".join(_describe(value) for value in output)
    return type(output).__name__
