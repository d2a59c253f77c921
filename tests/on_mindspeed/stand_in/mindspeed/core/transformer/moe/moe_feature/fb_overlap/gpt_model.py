"""Backward of a model whose layers' graphs are cut off from each other."""

from __future__ import annotations

from typing import Any

from mindspeed.core.transformer.moe.moe_feature.fb_overlap.transformer_block import transformer_block_backward


def gpt_model_backward(model_grad: Any, layer_graphs: list[Any]) -> Any:
    """The gradient of the first layer's input."""
    return transformer_block_backward(model_grad, layer_graphs)
