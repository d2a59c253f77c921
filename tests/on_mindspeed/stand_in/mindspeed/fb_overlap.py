"""moe_fb_overlap: the forward of a micro-batch also runs the backward of the one before, layer by layer.

A layer that was checkpointed is run again there, outside autograd's backward, with the inputs that its graph
has kept. `forward` of blocks and layers is set on the instances.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from types import MethodType
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec

from mindspeed.layers import MindSpeedGmmExperts


class MindSpeedFbOverlapMoELayer(MoELayer): ...


@dataclass
class LayerGraph:
    """One layer's forward of one micro-batch; `layer_inputs` is what it got besides its hidden states."""

    layer: Any
    layer_input: torch.Tensor
    layer_inputs: Any
    output: torch.Tensor
    checkpointed: bool


def moe_spec_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The spec with MindSpeed's layer in it."""

    @wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        spec = fn(*args, **kwargs)
        spec.module = MindSpeedFbOverlapMoELayer
        spec.submodules.experts = ModuleSpec(module=MindSpeedGmmExperts)
        return spec

    return wrapper


def block_init_wrapper(init_fn: Callable[..., None]) -> Callable[..., None]:
    """A block that hands its layers' graphs on, and whose layers overlap."""

    @wraps(init_fn)
    def wrapper(block: Any, *args: Any, **kwargs: Any) -> None:
        init_fn(block, *args, **kwargs)
        block.forward = MethodType(_block_forward, block)
        for layer in block.layers:
            layer.forward = MethodType(_layer_forward, layer)

    return wrapper


def schedule_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's schedule for passes without grad."""

    @wraps(fn)
    def wrapper() -> Any:
        return _schedule if torch.is_grad_enabled() else fn()

    return wrapper


def _forward(layer: Any, hidden_states: torch.Tensor, *inputs: Any, checkpoint: bool) -> Any:
    """A layer; without grad where `checkpoint`: it is going to run again."""
    if layer.layer_number > 1:  # the first one's input is the embedding's output, and no leaf
        hidden_states = hidden_states.detach().requires_grad_()
    mask, rotary = inputs
    with torch.no_grad() if checkpoint else contextlib.nullcontext():
        output, context = type(layer).forward(
            layer, hidden_states=hidden_states, attention_mask=mask, rotary_pos_emb=rotary
        )
    return output, context, LayerGraph(layer, hidden_states, inputs, output, checkpoint)


def _backward(grad: Any, graph: LayerGraph) -> Any:
    """Backward of one layer; where it was checkpointed, after running it again."""
    if graph.checkpointed:
        with torch.enable_grad():
            _, _, graph = _forward(graph.layer, graph.layer_input, *graph.layer_inputs, checkpoint=False)
    torch.autograd.backward(graph.output, grad)
    return graph.layer_input.grad if graph.layer_input.is_leaf else None


def _layer_forward(
    fwd_layer: Any,
    hidden_states: Any,
    attention_mask: Any,
    bwd_layer_output_grad: Any = None,
    bwd_layer_graph: LayerGraph | None = None,
    rotary_pos_emb: Any = None,
    checkpoint: bool = False,
) -> Any:
    """The `forward` of each layer: (output, context, graph), and with a backward also its gradient."""
    inputs = (attention_mask, rotary_pos_emb)
    if bwd_layer_graph is None:
        return _forward(fwd_layer, hidden_states, *inputs, checkpoint=checkpoint)
    grad = _backward(bwd_layer_output_grad, bwd_layer_graph)
    return *_forward(fwd_layer, hidden_states, *inputs, checkpoint=checkpoint), grad


def _block_forward(
    self: Any,
    hidden_states: Any,
    attention_mask: Any,
    rotary_pos_emb: Any = None,
    bwd_block_output_grad: Any = None,
    bwd_block_graphs: list[LayerGraph] | None = None,
    **_: Any,
) -> Any:
    """All layers, first to last; beside each, if given, one of the micro-batch before, last to first."""
    grad = bwd_block_output_grad
    arguments = {"attention_mask": attention_mask, "rotary_pos_emb": rotary_pos_emb}
    arguments["checkpoint"] = self.config.recompute_granularity == "full"
    self.graphs = []
    for layer in self.layers:
        before = {}
        if bwd_block_graphs is not None:
            before = {"bwd_layer_output_grad": grad, "bwd_layer_graph": bwd_block_graphs.pop()}
        hidden_states, _, graph, *grads = layer(hidden_states, **arguments, **before)
        grad = grads[0] if grads else None
        self.graphs.append(graph)
    self.cut = hidden_states.detach().requires_grad_()
    return self.final_layernorm(self.cut)


def _schedule(
    *, forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int, **_: Any
) -> list[Any]:
    """All micro-batches; what the loss function said of each. The last backward stands alone."""
    carried: dict[str, Any] = {}
    store = []
    for _ in range(num_microbatches):
        with _handed_to(model, carried):
            output, loss_func = forward_step_func(data_iterator, model)
        loss, reduced = loss_func(output)
        store.append(reduced)
        (loss / num_microbatches).backward()  # down to the final norm, where the graph is cut
        block = model.decoder
        carried = {"bwd_block_output_grad": block.cut.grad, "bwd_block_graphs": block.graphs}
    grad = block.cut.grad
    while block.graphs:
        grad = _backward(grad, block.graphs.pop())
    return store


@contextlib.contextmanager
def _handed_to(model: Any, carried: dict[str, Any]) -> Iterator[None]:
    """Whoever calls the model's forward also hands on the backward that it is to run."""
    own_forward = model.forward
    model.forward = lambda *args, **kwargs: own_forward(*args, **kwargs, extra_block_kwargs=carried)
    yield
    model.forward = own_forward
