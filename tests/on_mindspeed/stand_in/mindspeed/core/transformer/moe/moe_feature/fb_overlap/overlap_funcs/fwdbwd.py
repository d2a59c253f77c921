"""A layer's forward, with the backward of a layer of the micro-batch before it in between."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from mindspeed.core.transformer.moe.moe_feature.fb_overlap.modules.utils import (
    P2PCommOutput,
    run_graph_backward,
)
from mindspeed.core.transformer.moe.moe_feature.fb_overlap.overlap_funcs.bwd import backward_before_experts
from mindspeed.core.transformer.moe.moe_feature.fb_overlap.overlap_funcs.fwd import Pieces


def transformer_layer_forward_moe_backward_moe_overlaping(
    fwd_layer: Any,
    hidden_states: Any,
    attention_mask: Any,
    bwd_layer_output_grad: Any = None,
    bwd_layer_graph: Any = None,
    bwd_unperm_a2a_handle: Any = None,
    next_bwd_layer_graph: Any = None,
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
    """(output, context, graph, (gradient of the backward's input, None), P2PCommOutput)."""
    mode = torch.no_grad if checkpoint else nullcontext
    run_graph_backward(bwd_layer_graph.unperm2_graph, bwd_layer_output_grad)
    with mode():
        pieces = Pieces(fwd_layer, hidden_states, checkpoint)
        pieces.attend(attention_mask, rotary_pos_emb, attention_bias, packed_seq_params)
        pieces.route()
        pieces.compute()
    grad = backward_before_experts(bwd_layer_graph)
    with mode():
        output, graph = pieces.finish()
    return output, context, graph, (grad, None), P2PCommOutput(grad)
