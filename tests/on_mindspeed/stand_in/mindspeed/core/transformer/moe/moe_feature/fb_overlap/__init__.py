"""moe_fb_overlap: layer by layer, a micro-batch's forward with the backward of the one before it."""

from mindspeed.core.transformer.moe.moe_feature.fb_overlap.transformer_block import (
    transformer_block_fb_overlap_init_wrapper,
)

__all__ = ["transformer_block_fb_overlap_init_wrapper"]
