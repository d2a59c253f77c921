"""The schedule: each forward carries the backward before it; the last backward stands alone."""

from __future__ import annotations

import contextlib
from typing import Any

from megatron.core.utils import get_model_config

from mindspeed.core.transformer.moe.moe_feature.fb_overlap.gpt_model import gpt_model_backward
from mindspeed.core.transformer.moe.moe_feature.fb_overlap.vpp_schedules import (
    forward_step,
    forward_step_func_wrapper,
)


def forward_backward_no_pipelining(
    *,
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    seq_length: int,
    micro_batch_size: int,
    decoder_seq_length: int | None = None,
    forward_only: bool = False,
    collect_non_loss_data: bool = False,
    first_val_step: bool | None = None,
    **_: Any,
) -> list[Any]:
    """All micro-batches; what the loss function said of each."""
    model = model[0] if isinstance(model, list) else model
    data_iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    step = forward_step_func_wrapper(forward_step_func)
    config = get_model_config(model)
    carried, graphs, grad, store = None, [], None, []
    for number in range(num_microbatches):
        last = number == num_microbatches - 1
        sync = contextlib.nullcontext if last or config.no_sync_func is None else config.no_sync_func
        with sync():
            loss, graphs = forward_step(step, data_iterator, model, num_microbatches, store, carried)
            if not forward_only:
                loss.backward()  # down to the final norm, where the graph is cut
                grad = graphs[-1].unperm2_graph[1].grad
                carried = {
                    "pp_comm_params": None,
                    "bwd_pp_comm_params": None,
                    "bwd_block_output_grad": grad,
                    "bwd_block_graphs": graphs,
                }
    if not forward_only:
        gpt_model_backward(grad, graphs)
        if config.finalize_model_grads_func is not None:
            config.finalize_model_grads_func([model], None)
    return store
