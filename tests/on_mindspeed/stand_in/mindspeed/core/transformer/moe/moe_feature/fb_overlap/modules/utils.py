"""What a layer's forward leaves for its backward: its pieces of graph, cut off from each other."""

from __future__ import annotations

from typing import Any

import torch


def detach_tensor(tensor: torch.Tensor | None, checkpoint_forward: bool = False) -> Any:
    """The same values as a new leaf; the tensor itself where the forward is going to be recomputed."""
    if checkpoint_forward or tensor is None:
        return tensor
    detached = tensor.detach()
    detached.requires_grad = True
    return detached


def run_graph_backward(graph: Any, output_tensor_grad: Any = None) -> None:
    """Backward of one piece; then its output's memory is given back, as in the original."""
    output, following = graph
    grad = following.grad if output_tensor_grad is None else output_tensor_grad
    torch.autograd.backward(output, grad)
    output.untyped_storage().resize_(0)


class LayerGraph:
    """One layer's forward of one micro-batch.

    Attributes:
        layer, layer_input: where it ran and on what.
        checkpointed: it ran without grad and has to run again.
        layer_inputs: what else it got, in the order in which the recompute hands it on.
        is_moe_layer: it has experts.
        attn_graph, pre_mlp_layernorm_graph, router_graph, unperm2_graph: (output, the next piece's input).
    """

    layer_inputs: Any

    def __init__(self, saved_graphs: Any, layer_input: Any, layer: Any, checkpointed: bool = False) -> None:
        self.attn_graph, self.pre_mlp_layernorm_graph, self.router_graph, self.unperm2_graph = saved_graphs
        if checkpointed:
            self.unperm2_graph = (None, None)
        self.layer_input = layer_input
        self.checkpointed = checkpointed
        self.layer = layer
        self.is_moe_layer = hasattr(layer.mlp, "experts")

    def record_layer_inputs(self, *args: Any) -> None:
        """Keep what the layer got besides its hidden states."""
        self.layer_inputs = args
