"""Compiled modules around a router: a compiled graph skips hooks that come later, so it must not run."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from npu_replay.errors import RouterError
from npu_replay.routers import Router


def eager(chunks: Sequence[nn.Module], routers: Sequence[Sequence[Router]]) -> AbstractContextManager[None]:
    """A context in which modules that contain a router run eagerly.

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
        return contextlib.nullcontext()
    if not hasattr(torch.compiler, "set_stance"):
        raise RouterError(
            "a compiled module contains a router, and its graph would skip the hooks",
            where=compiled[0] or "the module itself",
            expected="torch 2.6 or newer, where it can be run eagerly for the time of the block",
            got=f"torch {torch.__version__}",
            cause="torch.compile on the model or a layer; compile the attention and the experts instead",
        )
    return _stance.hold()


class _Stance:
    """force_eager for the process, while at least one block asks for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        self._eager: Any = None

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        with self._lock:
            if self._open == 0:
                self._eager = torch.compiler.set_stance("force_eager")
                self._eager.__enter__()
            self._open += 1
        try:
            yield
        finally:
            with self._lock:
                self._open -= 1
                if self._open == 0:
                    self._eager.__exit__(None, None, None)
                    self._eager = None


_stance = _Stance()


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
