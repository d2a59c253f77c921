"""The routes of one micro-batch, and their copies on the devices of a model."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from npu_replay.routes.arguments import StageLabels
from npu_replay.routes.routed_experts import RoutedExperts

_OfLayer: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None]"
_OnDevice: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None, dict[int, _OfLayer]]"
_FEW = 2**18
"""Ids of a micro-batch that are held as int64 on the device: 2 MB."""


class DeviceRoutes:
    """Routes of one micro-batch for one chunk, and their copies on the devices of a model.

    Args:
        routes: rows as the routers have them.
        labels: of the chunk's routers.

    Attributes:
        rows: how many there are.
        missing: int64, those without a route; None if every row has one.
        on: by device, the narrow ids [rows, layers, topk], `missing` there, and for each layer its ids
            [rows, topk] and those that its router gets: narrow ones and None, or int64 both where they are
            few, as a cast each would cost more.
        columns: of the narrow ids, by layer.
    """

    def __init__(self, routes: RoutedExperts, labels: StageLabels) -> None:
        self.routes = routes
        self.rows = len(routes)
        self.columns = {label: column for column, label in enumerate(labels)}
        self._of_all = routes.columns(labels)
        missing = (~routes.recorded).nonzero()[:, 0]
        self.missing: torch.Tensor | None = missing if len(missing) else None
        self.on: dict[torch.device, _OnDevice] = {}

    @property
    def ids(self) -> torch.Tensor:
        """The narrow ids on the host, [rows, layers, topk], a column for each router."""
        return self.routes.ids[:, self._of_all]

    def send(self, device: torch.device) -> None:
        """Have them on a device; without waiting for them, and once."""
        if device in self.on or not self.columns:
            return
        ids = to_device(self.ids, device)
        given: Any = ids.transpose(0, 1)
        handed: Any = [None] * len(given)
        if ids.numel() <= _FEW and not torch.is_inference_mode_enabled():
            given = given.to(torch.int64, memory_format=torch.contiguous_format)
            handed = [one.data for one in given.clone().unbind()]  # each counts how often it is written into
        missing = None if self.missing is None else to_device(self.missing, device)
        self.on[device] = ids, missing, dict(zip(self.columns, zip(given, handed, strict=True), strict=True))


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on the device that the host doesn't wait for, which only pinned memory allows."""
    if device.type == "cpu":
        return tensor
    try:
        pinned = tensor.contiguous().pin_memory()
    except (RuntimeError, NotImplementedError):  # a device without such memory, or no more of it
        return tensor.to(device)
    return pinned.to(device, non_blocking=True)
