"""A layer's forward, its backward, and both in turn."""

from mindspeed.core.transformer.moe.moe_feature.fb_overlap.overlap_funcs.bwd import (
    transformer_layer_backward_dense,
    transformer_layer_backward_moe,
)
from mindspeed.core.transformer.moe.moe_feature.fb_overlap.overlap_funcs.fwd import (
    router_forward,
    transformer_layer_forward_dense,
    transformer_layer_forward_moe,
)
from mindspeed.core.transformer.moe.moe_feature.fb_overlap.overlap_funcs.fwdbwd import (
    transformer_layer_forward_moe_backward_moe_overlaping,
)

__all__ = [
    "router_forward",
    "transformer_layer_backward_dense",
    "transformer_layer_backward_moe",
    "transformer_layer_forward_dense",
    "transformer_layer_forward_moe",
    "transformer_layer_forward_moe_backward_moe_overlaping",
]
