"""A layer's backward in pieces, last piece first; no torch backward runs around them."""

from __future__ import annotations

from typing import Any

from mindspeed.core.transformer.moe.moe_feature.fb_overlap.modules.utils import run_graph_backward


def transformer_layer_backward_moe(layer_output_grad: Any, layer_graph: Any) -> Any:
    """The gradient of the layer's input; None where that is no leaf."""
    run_graph_backward(layer_graph.unperm2_graph, layer_output_grad)
    return backward_before_experts(layer_graph)


def backward_before_experts(layer_graph: Any) -> Any:
    """Router, norm and attention."""
    run_graph_backward(layer_graph.router_graph)
    return _backward_before_mlp(layer_graph)


def transformer_layer_backward_dense(layer_output_grad: Any, layer_graph: Any) -> Any:
    """The same for a layer without experts."""
    run_graph_backward(layer_graph.unperm2_graph, layer_output_grad)
    return _backward_before_mlp(layer_graph)


def _backward_before_mlp(layer_graph: Any) -> Any:
    run_graph_backward(layer_graph.pre_mlp_layernorm_graph)
    run_graph_backward(layer_graph.attn_graph)
    # A layer's input that is no leaf (the embedding's output) has had its backward with this one's.
    return layer_graph.layer_input.grad if layer_graph.layer_input.is_leaf else None
