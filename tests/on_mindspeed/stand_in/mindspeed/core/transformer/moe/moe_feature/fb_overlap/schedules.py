"""The schedule: each forward carries the backward before it; the last backward stands alone."""

from __future__ import annotations

import contextlib
from typing import Any

from megatron.core.utils import get_attr_wrapped_model, get_model_config
from mindspeed.core.transformer.moe.moe_feature.fb_overlap.transformer_layer import transformer_layer_backward


def forward_backward_no_pipelining(
    *,
    forward_step_func: Any,
    data_iterator: Any,
    model: Any,
    num_microbatches: int,
    forward_only: bool = False,
    **_: Any,
) -> list[Any]:
    """All micro-batches; what the loss function said of each."""
    model = model[0] if isinstance(model, list) else model
    data_iterator = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    config = get_model_config(model)
    block = get_attr_wrapped_model(model, "decoder")
    carried: dict[str, Any] | None = None
    grad = None
    graphs = []
    store = []
    for number in range(num_microbatches):
        last = number == num_microbatches - 1
        sync = contextlib.nullcontext if last or config.no_sync_func is None else config.no_sync_func
        with sync():
            with _handed_to(model, carried):
                output, loss_func = forward_step_func(data_iterator, model)
            loss, *counted, reduced = loss_func(output)
            store.append(reduced)
            loss = (loss / counted[0] if counted else loss) / num_microbatches
            if not forward_only:
                graphs = block.fwd_layer_graphs
                loss.backward()  # down to the final norm, where the graph is cut
                grad = graphs[-1].unperm2_graph[1].grad
                carried = {"bwd_block_output_grad": grad, "bwd_block_graphs": graphs}
    while graphs:  # of the last micro-batch, last layer first
        grad = transformer_layer_backward(grad, graphs.pop(-1))
    if not forward_only and config.finalize_model_grads_func is not None:
        config.finalize_model_grads_func([model], None)
    return store


@contextlib.contextmanager
def _handed_to(model: Any, carried: dict[str, Any] | None) -> Any:
    """Whoever calls the model's forward also hands on the backward that it is to run."""
    own_forward = model.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        return own_forward(*args, **kwargs, extra_block_kwargs=carried)

    model.forward = forward
    yield
    model.forward = own_forward
