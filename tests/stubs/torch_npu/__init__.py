"""A stub of torch_npu for a machine without an NPU.

Real MindSpeed can be imported with it, and its MoE layers run, forward and backward, on the CPU. The
operators that they need are written in plain torch (operators.py); every other npu_* raises when it is
called, so nothing can pass by computing with a kernel that isn't there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_npu import contrib, npu, on_cpu, operators, utils
from torch_npu._C import _distributed_c10d
from torch_npu.operators import *  # noqa: F403  torch_npu has its operators at its top

__version__ = "2.7.1"
unsupported_dtype: list[torch.dtype] = []

torch.npu = npu
on_cpu.lend_devices()
on_cpu.lend_histogram()
on_cpu.lend_order()
on_cpu.lend_groups()


def __getattr__(name: str) -> Callable[..., Any]:
    if not name.startswith(("npu_", "_npu_")):
        raise AttributeError(f"the torch_npu stub has no {name!r}")

    def missing(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"torch_npu stub: {name} was called on a machine without an NPU")

    return missing


__all__ = ["_distributed_c10d", "contrib", "npu", "operators", "utils"]
