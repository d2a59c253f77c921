"""A layer under moe_fb_overlap: its forward also runs, and reruns, a layer of the micro-batch before."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from mindspeed.core.transformer.moe.moe_feature.fb_overlap.modules.utils import (
    LayerGraph,
    detach_tensor,
    run_graph_backward,
)
from mindspeed.core.transformer.moe.moe_feature.fb_overlap.overlap_funcs.fwd import (
    Pieces,
    backward_before_experts,
    transformer_layer_forward_moe,
)


def transformer_layer_forward(*args: Any, **kwargs: Any) -> Any:
    """The layer that is the first argument; without grad where `checkpoint`: it is going to run again."""
    with torch.no_grad() if kwargs["checkpoint"] else nullcontext():
        return transformer_layer_forward_moe(*args, **kwargs)


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
    run_graph_backward(layer_graph.unperm2_graph, layer_output_grad)
    return backward_before_experts(layer_graph)


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
        given = {
            "attention_mask": attention_mask,
            "rotary_pos_emb": rotary_pos_emb,
            "attention_bias": attention_bias,
            "packed_seq_params": packed_seq_params,
        }
        run_graph_backward(bwd_layer_graph.unperm2_graph, bwd_layer_output_grad)
        with torch.no_grad() if checkpoint else nullcontext():
            pieces = Pieces(fwd_layer, hidden_states, checkpoint, **given)
        grad = backward_before_experts(bwd_layer_graph)
        with torch.no_grad() if checkpoint else nullcontext():
            output, graph = pieces.finish()
        out = (output, context, graph, (grad, None))
    else:
        out = transformer_layer_forward(fwd_layer, hidden_states, *inputs, checkpoint=checkpoint)
        if bwd_layer_graph is not None:
            out = (*out, (transformer_layer_backward(bwd_layer_output_grad, bwd_layer_graph), None))
    if checkpoint:
        out[2].record_layer_inputs(*inputs)
    return out
