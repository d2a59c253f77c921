"""One micro-batch's routes on their way to the device, or to each device of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from npu_replay.routes.routed_experts import RoutedExperts

Staged: TypeAlias = "tuple[dict[int, torch.Tensor], torch.Tensor | None]"
"""On the device: narrow ids [rows, topk] by layer, and the rows without a route, if any."""


class Packet:
    """Routes of one micro-batch for some layers, and their copies on devices.

    Args:
        routes: rows as the routers have them.
    """

    def __init__(self, routes: RoutedExperts) -> None:
        self.routes = routes
        missing = (~routes.recorded).nonzero()[:, 0]
        self.missing: torch.Tensor | None = missing if len(missing) else None
        self._staged: dict[torch.device, Staged] = {}

    def staged(self, labels: Sequence[int], device: torch.device) -> Staged:
        """These layers on the device, narrow; sent to each device once, and without waiting for them."""
        if device not in self._staged:
            ids = to_device(self.routes.only(labels).ids, device)
            missing = None if self.missing is None else to_device(self.missing, device)
            self._staged[device] = dict(zip(labels, ids.unbind(1), strict=True)), missing
        return self._staged[device]

    def unstage(self) -> None:
        """Let go of the copies on devices; what a recompute needs is kept by itself."""
        self._staged.clear()


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device that the host doesn't wait for, which only pinned memory allows."""
    if device.type == "cpu":
        return tensor
    try:
        pinned = tensor.contiguous().pin_memory()
    except (RuntimeError, NotImplementedError):  # a device without such memory, or no more of it
        return tensor.to(device)
    return pinned.to(device, non_blocking=True)
