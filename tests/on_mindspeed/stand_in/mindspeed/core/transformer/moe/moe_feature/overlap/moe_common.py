"""A step of a layer, cut off from the graph around it: detached inputs, and grad whatever the mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a leaf that asks for a gradient; a tensor that is one already stays."""
    if tensor.requires_grad and tensor.grad_fn is None:
        return tensor
    return tensor.detach().requires_grad_()


def forward_func(func: Callable[..., Any], inputs: Any) -> tuple[Any, ...]:
    """func's output on detached inputs, and these inputs."""
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    detached = [leaf(one) if torch.is_tensor(one) and one.is_floating_point() else one for one in given]
    with torch.enable_grad():
        output = func(*detached)
    return output, *detached


def backward_steps(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    """Backward of experts and then router, each a graph of its own; the gradient of the layer's input."""
    hidden_states, scores, detached_scores, output = ctx.saved_tensors
    output.backward(grad)
    scores.backward(detached_scores.grad)
    return hidden_states.grad
