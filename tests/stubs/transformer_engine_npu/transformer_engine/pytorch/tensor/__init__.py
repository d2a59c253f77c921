"""Quantized tensors: Megatron-core asks whether a tensor is one."""

from __future__ import annotations

import torch


class QuantizedTensor(torch.Tensor): ...
