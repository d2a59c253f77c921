"""CUDA in torch.

Probes: `capability`. Offers: `remedy`. Changes nothing, so there is nothing to undo.
"""

from __future__ import annotations

import torch

from npu_replay.compat.probe import Capability

NAME = "cuda"
BACKEND = "nccl"
MODULE = ""
"""What has to be imported for it: nothing, it is torch's own."""


def capability(kind: str, devices: int) -> Capability:
    """CUDA, where torch's accelerator is of this kind. torch.cuda isn't asked: it may be torch_npu's."""
    if kind == NAME:
        return Capability("CUDA", "works", f"{devices} device{'s' if devices != 1 else ''}")
    if torch.version.cuda is not None:
        return Capability("CUDA", "missing", "torch finds no device", "nvidia-smi should list one")
    return Capability("CUDA", "missing", "this torch is built without it")


def remedy() -> str:
    """What to do where it is here and doesn't work."""
    return "nvidia-smi should list a free device"
