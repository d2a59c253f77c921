"""How far the routes of a replay are from what its routers would choose now."""

from __future__ import annotations

import torch

from npu_replay.errors import MicroBatchError, micro_batch, share
from npu_replay.sessions.effect import Count
from npu_replay.sessions.micro_batches import Forward


class LiveMismatch:
    """Counts token-layers with a route, and those of them where the live router would have chosen otherwise.

    Args:
        always: in every forward.
        most: in each chunk's first forward that has routes, and refuses a larger share than this, 0 to 1.
    """

    def __init__(self, always: bool, most: float | None) -> None:
        self.differing = Count()
        self.compared = 0
        self._always = always
        self._most = None if most is None else share(most, "max_live_mismatch", "token-layers")
        self._first: dict[int, tuple[Count, int]] = {}
        self._checked: set[int] = set()
        """The chunks that have had that forward."""

    def asks(self, forward: Forward) -> bool:
        """Is the live choice wanted in this forward? It costs a top-k."""
        return self._always or self._is_first(forward)

    def _is_first(self, forward: Forward) -> bool:
        return self._most is not None and forward.chunk not in self._checked

    def add(
        self, forward: Forward, given: torch.Tensor, own: torch.Tensor, missing: torch.Tensor | None
    ) -> None:
        """Hold the ids that a router was given against its own, [rows, topk] each, but for missing rows."""
        differ = (given.sort(dim=1).values != own.sort(dim=1).values).any(dim=1)
        compared = len(differ)
        if missing is not None:
            differ[missing] = False
            compared -= len(missing)
        if self._always:
            self.differing.add(differ)
            self.compared += compared
        if self._is_first(forward):
            count, before = self._first.get(forward.chunk, (Count(), 0))
            count.add(differ)
            self._first[forward.chunk] = count, before + compared

    def check(self, chunk: int, number: int | None) -> None:
        """At the end of a chunk's forward, None if it raised: are the first routes anywhere near its routers'
        own choice?"""
        differing, compared = self._first.pop(chunk, (Count(), 0))
        if number is None or not compared or self._most is None:
            return
        self._checked.add(chunk)
        found = int(differing) / compared
        if found > self._most:
            raise MicroBatchError(
                "the routes are far from what the routers would choose for these tokens",
                where=f"{micro_batch(number)}, chunk {chunk}",
                expected=f"at most {self._most:.1%} of the token-layers to differ (max_live_mismatch, or in "
                "a verl job NPU_REPLAY_MAX_LIVE_MISMATCH)",
                got=f"{found:.1%}",
                cause="routes of another micro-batch or of other weights, rows in another order "
                "(TokenLayout's order=, side=), or a rollout in so low a precision that a higher ceiling is "
                "right",
            )
