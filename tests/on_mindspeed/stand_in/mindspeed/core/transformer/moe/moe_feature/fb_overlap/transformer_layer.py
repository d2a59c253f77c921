"""A layer under moe_fb_overlap: its forward also runs, and reruns, a layer of the micro-batch before."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from mindspeed.core.transformer.moe.moe_feature.fb_overlap.modules.utils import (
    LayerGraph,
    P2PCommOutput,
    detach_tensor,
)
from mindspeed.core.transformer.moe.moe_feature.fb_overlap.overlap_funcs import (
    transformer_layer_backward_dense,
    transformer_layer_backward_moe,
    transformer_layer_forward_dense,
    transformer_layer_forward_moe,
    transformer_layer_forward_moe_backward_moe_overlaping,
)


def transformer_layer_forward(*args: Any, **kwargs: Any) -> Any:
    """The layer that is the first argument; without grad where `checkpoint`: it is going to run again."""
    layer = args[0]
    with torch.no_grad() if kwargs["checkpoint"] else nullcontext():
        moe = hasattr(layer.mlp, "experts")
        return (transformer_layer_forward_moe if moe else transformer_layer_forward_dense)(*args, **kwargs)


def transformer_layer_backward(layer_output_grad: Any, layer_graph: LayerGraph) -> Any:
    """Backward of one layer; where it was checkpointed, after running it again."""
    if layer_graph.checkpointed:
        following = layer_graph.unperm2_graph[1]
        with torch.enable_grad():
            if layer_graph.layer.layer_number > 1:
                layer_graph.layer_input = detach_tensor(layer_graph.layer_input)
            _, _, layer_graph = transformer_layer_forward(
                layer_graph.layer, layer_graph.layer_input, *layer_graph.layer_inputs, checkpoint=False
            )
        layer_graph.unperm2_graph = (layer_graph.unperm2_graph[0], following)
    backward = (
        transformer_layer_backward_moe if layer_graph.is_moe_layer else transformer_layer_backward_dense
    )
    return backward(layer_output_grad, layer_graph)


def should_run_fb_overlap(fwd_layer: Any, bwd_layer_graph: LayerGraph | None = None) -> bool:
    """Only two layers with experts are run in pieces in turn."""
    return hasattr(fwd_layer.mlp, "experts") and bwd_layer_graph is not None and bwd_layer_graph.is_moe_layer


def transformer_layer_forward_backward_overlaping(
    fwd_layer: Any,
    hidden_states: Any,
    attention_mask: Any,
    bwd_layer_output_grad: Any = None,
    bwd_layer_graph: LayerGraph | None = None,
    bwd_unperm_a2a_handle: Any = None,
    next_bwd_layer_graph: LayerGraph | None = None,
    context: Any = None,
    context_mask: Any = None,
    rotary_pos_emb: Any = None,
    rotary_pos_cos: Any = None,
    rotary_pos_sin: Any = None,
    attention_bias: Any = None,
    inference_params: Any = None,
    packed_seq_params: Any = None,
    pp_comm_params: Any = None,
    bwd_pp_comm_params: Any = None,
    checkpoint: bool = False,
) -> Any:
    """The `forward` of each layer: (output, context, graph), and with a backward also its gradient."""
    inputs = (
        attention_mask,
        context,
        context_mask,
        rotary_pos_emb,
        rotary_pos_cos,
        rotary_pos_sin,
        attention_bias,
        inference_params,
        packed_seq_params,
    )
    if should_run_fb_overlap(fwd_layer, bwd_layer_graph):
        assert bwd_layer_graph is not None
        if bwd_layer_graph.checkpointed:
            if bwd_layer_graph.layer.layer_number > 1:
                bwd_layer_graph.layer_input = detach_tensor(bwd_layer_graph.layer_input)
            _, _, bwd_layer_graph = transformer_layer_forward(
                bwd_layer_graph.layer,
                bwd_layer_graph.layer_input,
                *bwd_layer_graph.layer_inputs,
                checkpoint=False,
            )
        out = transformer_layer_forward_moe_backward_moe_overlaping(
            fwd_layer,
            hidden_states,
            attention_mask,
            bwd_layer_output_grad,
            bwd_layer_graph,
            bwd_unperm_a2a_handle,
            next_bwd_layer_graph,
            *inputs[1:],
            pp_comm_params,
            bwd_pp_comm_params,
            checkpoint=checkpoint,
        )
    else:
        out = transformer_layer_forward(fwd_layer, hidden_states, *inputs, checkpoint=checkpoint)
        if bwd_layer_graph is not None:
            grad = transformer_layer_backward(bwd_layer_output_grad, bwd_layer_graph)
            out = (*out, (grad, None), P2PCommOutput(grad))
    if checkpoint:
        out[2].record_layer_inputs(*inputs)
    return out
