"""What Megatron-core takes from `transformer_engine.pytorch`."""

from . import distributed, fp8, ops, router, tensor
from .distributed import checkpoint
from .fp8 import fp8_autocast, fp8_model_init
from .norms import RMSNorm
from .unbuilt import (
    DotProductAttention,
    Fp8Padding,
    Fp8Unpadding,
    GroupedLinear,
    LayerNorm,
    LayerNormLinear,
    Linear,
)

__all__ = [
    "DotProductAttention",
    "Fp8Padding",
    "Fp8Unpadding",
    "GroupedLinear",
    "LayerNorm",
    "LayerNormLinear",
    "Linear",
    "RMSNorm",
    "checkpoint",
    "distributed",
    "fp8",
    "fp8_autocast",
    "fp8_model_init",
    "ops",
    "router",
    "tensor",
]
