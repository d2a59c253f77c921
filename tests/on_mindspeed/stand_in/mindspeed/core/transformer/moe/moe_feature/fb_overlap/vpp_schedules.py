"""The steps of the schedules; the interleaved schedule itself isn't played."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model


def forward_step_func_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The caller's step function; meanwhile model.forward gets the backward that it is to run as well."""

    @wraps(fn)
    def wrapper(data_iterator: Any, model: Any, extra_block_kwargs: Any = None) -> Any:
        own_forward = model.forward
        model.forward = partial(model.forward, extra_block_kwargs=extra_block_kwargs)
        out = fn(data_iterator, model)
        model.forward = own_forward
        return out

    return wrapper


def forward_step(
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    forward_data_store: list[Any],
    extra_block_kwargs: Any = None,
) -> tuple[torch.Tensor, list[Any]]:
    """One micro-batch's loss, and its layers' graphs."""
    block = get_attr_wrapped_model(model, "decoder")
    output, loss_func = forward_step_func(data_iterator, model, extra_block_kwargs=extra_block_kwargs)
    loss, *counted, reduced = loss_func(output)
    forward_data_store.append(reduced)
    loss = (loss / counted[0] if counted else loss) / num_microbatches
    graphs = block.get_fwd_layer_graphs()
    if extra_block_kwargs is not None:
        block.get_pp_comm_output()
    return loss, graphs
