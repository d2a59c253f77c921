"""Stands in for torch_npu: importing it brings the simulated NPU of tests/npu_device.py.

HCCL is torch's process group of one rank, which sends nothing: what a job of one process needs.
"""

from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

import npu_device

__version__ = "2.13.0"


def _group(options: Any, _: Any) -> Any:
    if options.group_size != 1:
        raise NotImplementedError(f"{options.group_size} ranks on the simulated NPU, whose HCCL has one")
    return FakeProcessGroup._create_internal(options.group_rank, options.group_size)


def npu_fusion_attention(*_: Any, **__: Any) -> Any:
    """transformers imports it where it finds torch_npu, and calls it for flash attention alone."""
    raise NotImplementedError("fused attention on the simulated NPU")


npu_device.register()
dist.Backend.register_backend("hccl", _group, extended_api=True, devices=["npu"])
