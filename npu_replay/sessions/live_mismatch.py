"""live_mismatch: in how many token-layers the routes of a replay differ from the routers' own choice."""

from __future__ import annotations

import torch

from npu_replay.sessions.effect import Count


class LiveMismatch:
    """Counts token-layers with a route, and those of them where the live router would have chosen otherwise.

    Args:
        on: are they counted? It costs the routers' top-k.
    """

    def __init__(self, on: bool) -> None:
        self.on = on
        self.differing = Count()
        self.compared = 0
        self._running: list[tuple[torch.Tensor, int]] = []
        """Of each call in the forward that runs, a flag for each row, and how many rows were compared."""

    def add(self, given: torch.Tensor, own: torch.Tensor, missing: torch.Tensor | None) -> None:
        """Hold the ids that a router was given against its own, [rows, topk] each, but for missing rows."""
        differ = (given.sort(dim=1).values != own.sort(dim=1).values).any(dim=1)
        if missing is not None:
            differ[missing] = False
        self._running.append((differ, len(differ) - (0 if missing is None else len(missing))))

    def end(self, complete: bool) -> None:
        """Count what the calls of a forward have shown, if it came to its end."""
        shown, self._running = self._running, []
        for differ, compared in shown if complete else ():
            self.differing.add(differ)
            self.compared += compared
