"""A block under moe_fb_overlap: forward and layers' forward are set on the instances."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from mindspeed.args_utils import get_full_args as get_args
from mindspeed.core.transformer.moe.moe_feature.fb_overlap.modules.utils import detach_tensor
from mindspeed.core.transformer.moe.moe_feature.fb_overlap.transformer_layer import (
    transformer_layer_forward_backward_overlaping,
)


def transformer_block_fb_overlap_init_wrapper(init_fn: Callable[..., None]) -> Callable[..., None]:
    """A block that hands its layers' graphs on, and whose layers overlap."""

    @wraps(init_fn)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        init_fn(*args, **kwargs)
        block = args[0]
        if not get_args().moe_fb_overlap:
            return
        block.forward = types.MethodType(transformer_block_forward_backward_overlaping, block)
        for layer in block.layers:
            layer.forward = types.MethodType(transformer_layer_forward_backward_overlaping, layer)

    return wrapper


def transformer_block_forward_backward_overlaping(
    self: Any,
    hidden_states: Any,
    attention_mask: Any,
    context: Any = None,
    context_mask: Any = None,
    rotary_pos_emb: Any = None,
    rotary_pos_cos: Any = None,
    rotary_pos_sin: Any = None,
    attention_bias: Any = None,
    inference_context: Any = None,
    packed_seq_params: Any = None,
    sequence_len_offset: Any = None,
    inference_params: Any = None,
    bwd_block_output_grad: Any = None,
    bwd_block_graphs: list[Any] | None = None,
    pp_comm_params: Any = None,
    bwd_pp_comm_params: Any = None,
    **_: Any,
) -> Any:
    """All layers, first to last; beside each, if given, one of the micro-batch before, last to first.

    What Megatron 0.16 passes beyond this (`**_`) is an error on core_r0.16.0, which lags behind it.
    """
    given = {
        "context_mask": context_mask,
        "rotary_pos_emb": rotary_pos_emb,
        "rotary_pos_cos": rotary_pos_cos,
        "rotary_pos_sin": rotary_pos_sin,
        "attention_bias": attention_bias,
        "inference_params": inference_params,
        "packed_seq_params": packed_seq_params,
    }
    if not self.pre_process:
        hidden_states = self.input_tensor
    grad = bwd_block_output_grad
    handle = None
    graphs = []
    for number, layer in enumerate(self.layers):
        checkpoint = _is_checkpointed(self, number)
        if not (self.pre_process and number == 0):
            hidden_states = detach_tensor(hidden_states, checkpoint_forward=checkpoint)
        if bwd_block_graphs is None:
            hidden_states, context, graph = layer(
                hidden_states=hidden_states,
                attention_mask=attention_mask,
                context=context,
                checkpoint=checkpoint,
                **given,
            )
        else:
            hidden_states, context, graph, (grad, handle) = layer(
                hidden_states,
                attention_mask,
                grad,
                bwd_layer_graph=bwd_block_graphs.pop(-1),
                bwd_unperm_a2a_handle=handle,
                next_bwd_layer_graph=None,
                context=context,
                checkpoint=checkpoint,
                **given,
            )
        graphs.append(graph)
    if self.post_process and self.post_layer_norm and self.final_layernorm is not None:
        detached = detach_tensor(hidden_states)
        graphs[-1].unperm2_graph = (graphs[-1].unperm2_graph[0], detached)
        hidden_states = self.final_layernorm(detached)
    self.fwd_layer_graphs = graphs if torch.is_grad_enabled() else None
    return hidden_states


def _is_checkpointed(block: Any, number: int) -> bool:
    config = block.config
    if config.recompute_granularity != "full" or not block.training:
        return False
    if config.recompute_method == "uniform":
        assert config.recompute_num_layers == 1
        return True
    return number < config.recompute_num_layers
