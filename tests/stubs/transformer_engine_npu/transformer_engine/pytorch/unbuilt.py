"""Modules that Megatron-core derives classes from when it is imported, and that no test builds."""

from __future__ import annotations

from typing import Any

import torch


class Unbuilt(torch.nn.Module):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        name = type(self).__name__
        raise NotImplementedError(f"the stand-in of TransformerEngineNPU has the name of {name} alone")


class LayerNorm(Unbuilt): ...


class Linear(Unbuilt): ...


class LayerNormLinear(Unbuilt): ...


class GroupedLinear(Unbuilt): ...


class DotProductAttention(Unbuilt): ...


class Fp8Padding(Unbuilt): ...


class Fp8Unpadding(Unbuilt): ...
