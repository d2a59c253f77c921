"""What an NPU does and a CPU doesn't: device="npu", and collectives in the order of a stream."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

_COLLECTIVES = (
    "all_gather",
    "_all_gather_base",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "reduce",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor",
)
_FACTORIES = (
    "empty",
    "zeros",
    "ones",
    "full",
    "tensor",
    "arange",
    "rand",
    "randn",
    "empty_like",
    "zeros_like",
)


def lend_devices() -> None:
    """For the life of the process: like the real torch_npu, the stub is not taken back."""
    for name in _FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.to = _on_cpu(torch.Tensor.to)
    torch.Tensor.npu = _itself
    torch.Tensor.is_npu = False


def lend_histogram() -> None:
    """An NPU counts integers."""
    native = torch.histc

    def histc(values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if values.is_floating_point():
            return native(values, *args, **kwargs)
        return native(values.float(), *args, **kwargs).to(values.dtype)

    torch.histc = histc


def lend_order() -> None:
    """A collective has ended when it returns: on an NPU streams keep the order, and gloo knows no streams.

    MindSpeed records an event after an asynchronous collective, waits for that and frees the input.
    """
    for name in _COLLECTIVES:
        setattr(dist, name, _in_order(getattr(dist, name)))


def lend_groups() -> None:
    """What mc2 asks of a group, its name for HCCL: here the group itself."""
    # torch.device("npu") can then be written, though no tensor can lie there.
    torch.utils.rename_privateuse1_backend("npu")
    original = dist.ProcessGroup._get_backend

    def backend(group: dist.ProcessGroup, device: torch.device) -> Any:
        if device.type != "npu":
            return original(group, device)
        return SimpleNamespace(get_hccl_comm_name=lambda rank: group)

    dist.ProcessGroup._get_backend = backend


def _in_order(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        work = function(*args, **kwargs)
        if work is not None:
            work.wait()
        return work

    return called


def _itself(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if _is_accelerator(value) else value for value in args)
        device = kwargs.get("device")
        if _is_accelerator(device) or type(device) is int:
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)

    return called


def _is_accelerator(value: object) -> bool:
    return isinstance(value, (str, torch.device)) and str(value).split(":")[0] in ("npu", "cuda")
