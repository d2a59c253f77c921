"""Reports CUDA in torch. Probes: `capability`. Offers: `remedy`. Changes nothing."""

from __future__ import annotations

import torch

from npu_replay.compat.probe import Capability

NAME = "cuda"
BACKEND = "nccl"
MODULE = ""
"""The module to import for it: none, it is torch's own."""


def capability(kind: str, devices: int) -> Capability:
    """Return the capability CUDA; torch.cuda isn't asked, since it may be torch_npu's."""
    if kind == NAME:
        return Capability("CUDA", "works", f"{devices} device{'s' if devices != 1 else ''}")
    if torch.version.cuda is not None:
        return Capability("CUDA", "missing", "torch finds no device", "nvidia-smi should list one")
    return Capability("CUDA", "missing", "this torch is built without it")


def remedy() -> str:
    """Return what to do where CUDA is here and doesn't work."""
    return "nvidia-smi should list a free device"
