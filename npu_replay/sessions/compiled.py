"""Compiled modules around a router: a compiled graph skips hooks that come later, so it must not run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from npu_replay.errors import RouterError
from npu_replay.routers import Router


def hold_eager(chunks: Sequence[nn.Module], routers: Sequence[Sequence[Router]], holder: object) -> None:
    """Have modules that contain a router run eagerly, until `let_go(holder)`.

    Does nothing where none of them is compiled: the stance is the whole process's, and functions that a
    framework compiled for itself should stay so.

    Raises:
        RouterError: something is compiled and this torch has no `torch.compiler.set_stance` (before 2.6).
    """
    compiled = [
        path
        for chunk, found in zip(chunks, routers, strict=True)
        for path, module in chunk.named_modules()
        if is_compiled(module) and any(_is_around(path, router.path) for router in found)
    ]
    if not compiled:
        return
    if not hasattr(torch.compiler, "set_stance"):
        raise RouterError(
            "a compiled module contains a router, and its graph would skip the hooks",
            where=compiled[0] or "the module itself",
            expected="torch 2.6 or newer, where it can be run eagerly for the time of the block",
            got=f"torch {torch.__version__}",
            cause="torch.compile on the model or a layer; compile the attention and the experts instead",
        )
    _holders.add(holder)
    if not _stances:
        _stances.append(torch.compiler.set_stance("force_eager"))


def let_go(holder: object) -> None:
    """Undo `hold_eager`; the last holder gives the process its stance back."""
    _holders.discard(holder)
    if not _holders and _stances:
        _stances[0].__exit__(None, None, None)
        _stances.clear()


_holders: set[object] = set()
_stances: list[Any] = []
"""What gives the stance back, while it is ours."""


def _is_around(path: str, router: str) -> bool:
    """Does the module at `path` contain the router, or is it the router?"""
    return path in ("", router) or router.startswith(f"{path}.")


def is_compiled(module: nn.Module) -> bool:
    """Was this module compiled, by `module.compile()`, `torch.compile(module)` or through its forward?"""
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )
