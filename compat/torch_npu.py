"""Handles an Ascend NPU in torch (torch_npu), and what it changes for code that asks torch for its device.

Probes: `load`, `accelerator`, `capability`. Offers: `remedy`, `stand_in_for_cuda`. Changes
nothing but by `stand_in_for_cuda`, a switch of torch_npu's that can't be undone. The names below were read in
torch_npu 2.1 to 2.13, in op-plugin 6.0 to 26.1 and in vllm-ascend.
"""

from __future__ import annotations

import importlib
import importlib.util

import torch

from npu_replay.compat.probe import Capability, Product, unusable

NAME = "npu"
BACKEND = "hccl"
MODULE = "torch_npu"
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


# Probes


def load() -> str:
    """Import torch_npu if it is installed; return why this process has no NPU, empty if it has one."""
    # torch imports it by itself, unless AUTOLOAD=0.
    if not hasattr(torch, NAME):
        if importlib.util.find_spec(MODULE) is None:
            return f"{MODULE} is not installed"
        try:
            importlib.import_module(MODULE)
        except Exception as error:  # noqa: BLE001  a missing CANN raises anything
            return f"{type(error).__name__}: {error}"
    module = getattr(torch, NAME, None)
    if module is None or not module.is_available():
        return f"{MODULE} finds no device"
    return ""


def accelerator() -> tuple[str, int]:
    """Return the kind and number of torch's accelerators in this process; an empty name for none."""
    # torch.cuda isn't asked: it says True on an NPU after `torch_npu.contrib.transfer_to_npu` (MindSpeed's).
    if not torch.accelerator.is_available():
        return "", 0
    device = torch.accelerator.current_accelerator()
    return (device.type if device else ""), torch.accelerator.device_count()


def capability(kind: str, devices: int, product: Product) -> Capability:
    """Return the capability NPU, as far as this process knows without importing torch_npu."""
    if kind == NAME:
        return Capability("NPU", "works", f"{devices} device{'s' if devices != 1 else ''}")
    if not product.usable:
        return unusable("NPU", product, f"install {MODULE} again" if product.problem else "")
    why = f"{MODULE} is installed, but no device of it is in this process"
    return Capability("NPU", "missing", why, f"import {MODULE}")


# Offers


def remedy() -> str:
    """Return what to do where torch_npu is here and doesn't work."""
    return (
        f"source CANN's set_env.sh; then python -c 'import torch, {MODULE}' has to work, and npu-smi info. "
        f"Until then `import torch` may fail too, which loads {MODULE} by itself: export {AUTOLOAD}=0 keeps "
        "it from that, and the CPU can be used"
    )


def stand_in_for_cuda() -> None:
    """Make torch.cuda's names mean the NPU, as Megatron-core needs it. It can't be undone."""
    importlib.import_module(f"{MODULE}.contrib.transfer_to_npu")
