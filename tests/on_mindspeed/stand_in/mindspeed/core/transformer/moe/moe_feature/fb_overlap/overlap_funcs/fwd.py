"""A layer's forward in pieces: attention, norm, router, experts."""

from __future__ import annotations

from typing import Any

from mindspeed.core.transformer.moe.moe_feature.fb_overlap.modules.attention import attention_forward
from mindspeed.core.transformer.moe.moe_feature.fb_overlap.modules.utils import LayerGraph, detach_tensor
from mindspeed.core.transformer.moe.moe_feature.parts import compute


def router_forward(self: Any, hidden_states: Any) -> Any:
    """The one place where a router is called, as a module."""
    probs, routing_map = self.mlp.router(hidden_states)
    return probs, routing_map


class Pieces:
    """A forward on its way: what one piece leaves for the next."""

    def __init__(self, layer: Any, hidden_states: Any, checkpoint: bool) -> None:
        self.layer, self.layer_input, self.checkpoint = layer, hidden_states, checkpoint
        self.router: tuple[Any, Any] = (None, None)

    def attend(
        self, attention_mask: Any, rotary_pos_emb: Any, attention_bias: Any, packed_seq_params: Any
    ) -> None:
        """Attention and the norm after it."""
        attended = attention_forward(
            self.layer,
            self.layer_input,
            self.layer_input,
            attention_mask=attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            attention_bias=attention_bias,
            packed_seq_params=packed_seq_params,
        )
        self.attention = (attended, self._cut(attended))
        normed = self.layer.pre_mlp_layernorm(self.attention[1])
        self.norm = (normed, self._cut(normed))

    def route(self) -> None:
        """The router."""
        probs, self.routing_map = router_forward(self.layer, self.norm[1])
        self.router = (probs, self._cut(probs))

    def compute(self) -> None:
        """The experts."""
        self.computed = compute(self.layer.mlp, self.norm[1], self.router[1], self.routing_map), None

    def compute_dense(self) -> None:
        """The MLP of a layer without experts."""
        self.computed = self.layer.mlp(self.norm[1])

    def finish(self) -> tuple[Any, LayerGraph]:
        """The layer's output, and what its backward needs."""
        layer = self.layer
        with layer.bias_dropout_add_exec_handler():
            add = layer.mlp_bda(layer.training, layer.config.bias_dropout_fusion)
            output = add(self.computed, self.attention[1], layer.hidden_dropout)
        saved = (self.attention, self.norm, self.router, (output, None))
        return output, LayerGraph(saved, self.layer_input, layer, checkpointed=self.checkpoint)

    def _cut(self, tensor: Any) -> Any:
        return detach_tensor(tensor, checkpoint_forward=self.checkpoint)


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
    """A layer with experts: (output, context, graph)."""
    pieces = Pieces(self, hidden_states, checkpoint)
    pieces.attend(attention_mask, rotary_pos_emb, attention_bias, packed_seq_params)
    pieces.route()
    pieces.compute()
    output, graph = pieces.finish()
    return output, context, graph


def transformer_layer_forward_dense(
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
    """A layer without experts: (output, context, graph)."""
    pieces = Pieces(self, hidden_states, checkpoint)
    pieces.attend(attention_mask, rotary_pos_emb, attention_bias, packed_seq_params)
    pieces.compute_dense()
    output, graph = pieces.finish()
    return output, context, graph
