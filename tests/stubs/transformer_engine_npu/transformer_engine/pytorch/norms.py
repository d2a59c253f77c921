"""RMSNorm, which is the norm of MindSpeed core_r0.18.0 too."""

from __future__ import annotations

from typing import Any

import torch


class RMSNorm(torch.nn.Module):
    """Normalizes the last dimension by its root mean square, in float32."""

    def __init__(
        self,
        normalized_shape: int,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        start = torch.zeros if zero_centered_gamma else torch.ones
        dtype = params_dtype or torch.get_default_dtype()
        self.weight = torch.nn.Parameter(start(normalized_shape, dtype=dtype))
        if sequence_parallel is not None:
            self.weight.sequence_parallel = sequence_parallel

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        wide = hidden.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        scale = self.weight.float() + 1 if self.zero_centered_gamma else self.weight.float()
        return (normed * scale).to(hidden.dtype)
