"""A layer's forward in pieces (attention, norm, router, experts), and its backward, last piece first."""

from __future__ import annotations

from typing import Any

from mindspeed.core.transformer.moe.moe_feature.fb_overlap.modules.utils import (
    LayerGraph,
    detach_tensor,
    run_graph_backward,
)
from mindspeed.core.transformer.moe.moe_feature.parts import compute


class Pieces:
    """A forward up to the output of its experts, or of its MLP."""

    def __init__(self, layer: Any, hidden_states: Any, checkpoint: bool, **given: Any) -> None:
        self.layer = layer
        self.layer_input = hidden_states
        self.checkpoint = checkpoint
        attended = layer.self_attention(layer.input_layernorm(hidden_states), **given)
        self.attention = self._cut(self._added(layer.self_attn_bda, attended, hidden_states))
        self.norm = self._cut(layer.pre_mlp_layernorm(self.attention[1]))
        self.router = (None, None)
        if hasattr(layer.mlp, "experts"):
            probs, routing_map = layer.mlp.router(self.norm[1])
            self.router = self._cut(probs)
            self.computed = compute(layer.mlp, self.norm[1], self.router[1], routing_map), None
        else:
            self.computed = layer.mlp(self.norm[1])

    def finish(self) -> tuple[Any, LayerGraph]:
        """The layer's output, and what its backward needs."""
        output = self._added(self.layer.mlp_bda, self.computed, self.attention[1])
        saved = (self.attention, self.norm, self.router, (output, None))
        return output, LayerGraph(saved, self.layer_input, self.layer, checkpointed=self.checkpoint)

    def _added(self, how: Any, output: Any, residual: Any) -> Any:
        with self.layer.bias_dropout_add_exec_handler():
            add = how(self.layer.training, self.layer.config.bias_dropout_fusion)
            return add(output, residual, self.layer.hidden_dropout)

    def _cut(self, tensor: Any) -> tuple[Any, Any]:
        return tensor, detach_tensor(tensor, checkpoint_forward=self.checkpoint)


def transformer_layer_forward_moe(
    self: Any,
    hidden_states: Any,
    attention_mask: Any = None,
    context: Any = None,
    context_mask: Any = None,
    rotary_pos_emb: Any = None,
    rotary_pos_cos: Any = None,
    rotary_pos_sin: Any = None,
    attention_bias: Any = None,
    inference_params: Any = None,
    packed_seq_params: Any = None,
    checkpoint: bool = False,
) -> Any:
    """A layer, here with experts or without: (output, context, graph)."""
    pieces = Pieces(
        self,
        hidden_states,
        checkpoint,
        attention_mask=attention_mask,
        rotary_pos_emb=rotary_pos_emb,
        attention_bias=attention_bias,
        packed_seq_params=packed_seq_params,
    )
    output, graph = pieces.finish()
    return output, context, graph


def backward_before_experts(graph: LayerGraph) -> Any:
    """Router, norm and attention; the gradient of the layer's input, None where that is no leaf."""
    if graph.is_moe_layer:
        run_graph_backward(graph.router_graph)
    run_graph_backward(graph.pre_mlp_layernorm_graph)
    run_graph_backward(graph.attn_graph)
    # A layer's input that is no leaf (the embedding's output) has had its backward with this one's.
    return graph.layer_input.grad if graph.layer_input.is_leaf else None
