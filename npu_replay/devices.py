"""Choose the device to run on, without initialising devices that aren't used."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from npu_replay.compat import cpu, cuda, torch_npu
from npu_replay.errors import ReplayError

ACCELERATORS = (torch_npu, cuda)


def pick(name: str) -> torch.device:
    """Return the device called `name`; "auto" takes an accelerator if there is one.

    "cpu" hides CUDA's devices from this process, since Megatron-core puts routers onto one that it sees.

    Raises:
        ReplayError: it isn't available; the message says what is.
    """
    if name == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return torch.device(name)
    devices = available()
    if name == "auto":
        return torch.device(devices[0])
    ReplayError.unless(
        name in devices,
        f"there is no {name} device here",
        expected=" or ".join(devices),
        got=name,
        cause="torch built without it, a driver that is not loaded, or a package for it that fails to "
        "import; npu-replay doctor says which",
    )
    return torch.device(name)


def available() -> list[str]:
    torch_npu.load()
    kind, _ = torch_npu.accelerator()
    return [kind, "cpu"] if kind in {device.NAME for device in ACCELERATORS} else ["cpu"]


def name_of(device: torch.device) -> str:
    """Return the driver's name of a device; empty for the CPU.

    >>> name_of(torch.device("cpu"))
    ''
    """
    return "" if device.type == "cpu" else str(getattr(torch, device.type).get_device_name())


def backend(device: torch.device) -> str:
    """Return torch.distributed's back end for a device.

    >>> backend(torch.device("cpu"))
    'gloo'
    """
    backends: dict[str, str] = {accelerator.NAME: accelerator.BACKEND for accelerator in ACCELERATORS}
    return backends.get(device.type, "gloo")


@contextlib.contextmanager
def megatron_on(device: torch.device) -> Iterator[None]:
    """Provide what Megatron-core asks of CUDA, on a device that isn't CUDA's."""
    if device.type == torch_npu.NAME:
        torch_npu.stand_in_for_cuda()
    with cpu.lend():
        yield


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one CPU thread: small matrices don't gain from more, and threads wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
