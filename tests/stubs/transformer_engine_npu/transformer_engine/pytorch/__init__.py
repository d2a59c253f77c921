"""What Megatron-core takes from `transformer_engine.pytorch`, in modules and classes."""

from __future__ import annotations

from typing import Any

import torch

from . import ops as ops
from . import router as router
from . import tensor as tensor
from .distributed import checkpoint as checkpoint
from .fp8 import fp8_autocast as fp8_autocast
from .fp8 import fp8_model_init as fp8_model_init


class RMSNorm(torch.nn.RMSNorm):
    """torch's. It is the norm of MindSpeed core_r0.18.0 too.

    `zero_centered_gamma` and `params_dtype`, which Megatron-core sets, have their defaults in all tests.
    """

    def __init__(
        self, normalized_shape: int, eps: float = 1e-5, sequence_parallel: bool | None = None, **_: Any
    ) -> None:
        super().__init__(normalized_shape, eps)
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel


class Unbuilt(torch.nn.Module):
    """What Megatron-core derives classes from when it is imported, and no test builds."""

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        name = type(self).__name__
        raise NotImplementedError(f"the stand-in of TransformerEngineNPU has the name of {name} alone")


class Linear(Unbuilt): ...


class LayerNormLinear(Unbuilt): ...


class GroupedLinear(Unbuilt): ...


class DotProductAttention(Unbuilt): ...


class Fp8Padding(Unbuilt): ...


class Fp8Unpadding(Unbuilt): ...
