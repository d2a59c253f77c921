"""Bring results to the host: copies that are read without waiting, and sums that are read at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class HostCopy:
    """Holds copies of tensors in host memory, which a device fills when it comes to them.

    Without pinned memory or events (a device that lacks them, or none left) the copies are made when they are
    read, which waits for the device.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._events: list[torch.Event] = []
        self._on_way = True
        away = {tensor.device for tensor in tensors if not tensor.is_cpu}
        if not away:
            return
        try:
            self._tensors = [_sent(tensor) for tensor in tensors]
            self._events = [torch.Event(device) for device in away]
            for event in self._events:
                event.record()
        except (RuntimeError, NotImplementedError):
            self._tensors = list(tensors)
            self._on_way = False

    def has_come(self) -> bool:
        """Return whether a read returns without waiting."""
        return self._on_way and all(event.query() for event in self._events)

    def read(self) -> list[torch.Tensor]:
        """Return the copies; waits for the device."""
        for event in self._events:
            event.synchronize()
        self._events.clear()
        return [tensor.cpu() for tensor in self._tensors]


def _sent(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cpu:
        return tensor
    room = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True, device="cpu")
    return room.copy_(tensor, non_blocking=True)


class Count:
    """Counts on whatever devices its tensors are. Reading it waits for them."""

    def __init__(self) -> None:
        self._parts: dict[torch.device, torch.Tensor] = {}

    def add(self, counted: torch.Tensor) -> None:
        total = counted.sum()
        before = self._parts.get(total.device)
        self._parts[total.device] = total if before is None else before + total

    def __int__(self) -> int:
        return sum(int(part) for part in self._parts.values())
