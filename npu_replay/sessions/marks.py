"""Marks: recomputes that run outside backward, announced where the framework runs them.

Autograd tells a recompute as long as it runs inside backward. A schedule that runs a layer again by itself,
between the forwards of other micro-batches, looks like a forward; so the compat module that knows the place
marks it, and the session takes the marks in the router's next call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Marks:
    """What is known of the next call of each router of one chunk.

    Args:
        running: the number of the micro-batch whose forward this chunk runs now.
    """

    def __init__(self, running: Callable[[], int]) -> None:
        self.running = running
        self._foreseen: dict[int, Any] = {}
        self._announced: dict[int, int] = {}

    def foresee(self, router: nn.Module, token: object) -> None:
        """The router's next forward may be run again as long as `token` lives (it takes weak references)."""
        self._foreseen[id(router)] = token

    def announce(self, router: nn.Module, number: int) -> None:
        """The router's next call is the recompute of micro-batch `number`."""
        self._announced[id(router)] = number

    def take_foreseen(self, router: nn.Module) -> Any:
        """The token of `foresee`, once."""
        return self._foreseen.pop(id(router), None)

    def take_announced(self, router: nn.Module) -> int | None:
        """The number of `announce`, once."""
        return self._announced.pop(id(router), None)

    def clear(self) -> None:
        """Drop what no call has taken: an exception came between."""
        self._foreseen.clear()
        self._announced.clear()
