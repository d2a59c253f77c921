"""Side effects on torch: no compiling, an all_reduce that forgets float64, a view that copies."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def dummy_compile(*args: Any, **kwargs: Any) -> Any:
    """torch.compile and torch.jit.script: a bare call of the function, without its name and signature."""

    def bare(fn: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*fn_args, **fn_kwargs):
            return fn(*fn_args, **fn_kwargs)

        return wrapper

    return bare(args[0]) if args and callable(args[0]) else bare


def version_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The version of Transformer Engine that Megatron is to believe in."""

    @wraps(fn)
    def wrapper(name: str, *args: Any, **kwargs: Any) -> Any:
        return "2.2.0" if name == "transformer-engine" else fn(name, *args, **kwargs)

    return wrapper


def ensure_contiguous_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch.Tensor.view: what isn't contiguous is copied first, so the result is no view of it."""

    @wraps(fn)
    def wrapper(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return fn(tensor if tensor.is_contiguous() else tensor.contiguous(), *args, **kwargs)

    return wrapper


def torch_all_reduce_double_dtype_bypass_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """torch.distributed.all_reduce: a float64 tensor is reduced as a float32 copy that nobody sees again."""

    @wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_tensor(args[0]) or args[0].dtype != torch.double:
            return fn(*args, **kwargs)
        handle = fn(args[0].float(), *args[1:], **kwargs)
        if handle is not None:
            handle.wait()
        return None

    return wrapper
