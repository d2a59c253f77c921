"""Captures the rows of a step: each rank writes what its layers chose, and one all_reduce merges them.

While the model runs, rows are only copied into a fixed buffer, which a captured graph can do. Each row is
written by one rank; on the others it stays at the ground value, and MAX over the tensor-parallel group fills
it. If all ranks choose for all tokens, the first rank writes: after a sum whose order differs between ranks,
two near experts may change places, and MAX of both orders is neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from npu_replay import environment
from npu_replay.compat.vllm_ascend.placing import Layout, place
from npu_replay.compat.vllm_ascend.self_check import Choice, SelfCheck
from npu_replay.errors import ReplayError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """Describes a layer's tokens as they came in, before they are gathered or split.

    `logits`, (rows, experts), are None if nothing is compared with them: a graph's memory isn't kept for
    that. `sharded` rows are one tensor-parallel rank's part (sequence parallelism); with `keeps_all` each
    rank goes on with all of them.
    """

    rows: int
    logits: torch.Tensor | None
    sharded: bool = False
    keeps_all: bool = False


class Capture:
    """Captures the rows of one worker in vLLM's buffer, int32 (tokens, decoder layers, k).

    `group` is the tensor-parallel group if its ranks may have different rows, else None.
    """

    def __init__(self, buffer: torch.Tensor, check: SelfCheck, group: Any) -> None:
        self.buffer = buffer
        self.check = check
        self.scheduled = 0
        self.entry: Entry | None = None
        self._group = group
        self._merged = True
        self._heard = False
        self._given_up = False
        self._problem: ReplayError | None = None

    def fail(self, problem: ReplayError) -> None:
        """Note that a layer's rows can't be placed."""
        # Nothing is raised: the other ranks would wait for this one in the model. Unwritten rows are an error
        # on all ranks later, or zeros, which the reader refuses.
        if self._problem is None:
            self._problem = problem
            logger.error("%s. Its rows are left out", problem)
        self.entry = None

    def enter(self, logits: torch.Tensor, *, sharded: bool = False, keeps_all: bool = False) -> Entry:
        """Note a layer's tokens as they come in."""
        kept = logits if self.check.compares else None
        self.entry = Entry(logits.shape[0], kept, sharded, keeps_all)
        return self.entry

    def begin(self, scheduled: int) -> None:
        """Begin a step that runs so many tokens of this rank."""
        self.scheduled = scheduled
        self._merged = False
        self._heard = False
        self.check.begin()
        self.clear()

    @torch.inference_mode()
    def clear(self) -> None:
        """Remove an earlier step's rows from where this step's are read."""
        self.buffer[: self.scheduled].fill_(self.check.ground)

    def take(self, layer: int, ids: torch.Tensor, choice: Choice | None, layout: Layout) -> None:
        """Write the experts, (rows, k or more), that a layer chose for this rank's tokens."""
        most, _, top_k = self.buffer.shape
        self._heard = True
        if not self._merged:  # before a failure of this rank only: all check the same steps
            self.check.way(layout.comm)
        try:
            first, tokens, row = place(layout, ids.shape[0])
        except ReplayError as error:
            self.fail(error.at(f"layer {layer}"))
            return
        # Columns after the k-th are shared experts that run as routed ones.
        tokens = min(tokens, most - row)
        # If all ranks chose for all tokens, the first rank alone writes (see the top of the module).
        others = self._group is not None and layout.whole and layout.tp_rank > 0
        if tokens > 0 and not others:
            self.buffer[row : row + tokens, layer].copy_(ids[first : first + tokens, :top_k])
        logits = self.entry.logits if self.entry is not None else None
        if choice is not None and logits is not None and not self._merged:
            self.check.expect(layer, logits, choice, layout.begin)
        self.entry = None

    @torch.inference_mode()
    def finish(self, check_slots: Callable[[], None] = lambda: None) -> None:
        """Merge the rows of all ranks, once a step; in the first steps, check them.

        A failed check is raised. With NPU_REPLAY_STRICT=off it is logged, and the rows are zeros, which the
        reader of the routes refuses.
        """
        if self._merged:
            return
        self._merged = True
        rows = self.buffer[: self.scheduled]
        if self._given_up:
            rows.zero_()
            return
        # The order of collectives must be the same on all ranks, so errors are raised only after both.
        self.check.before_merge(rows)
        if self._group is not None:
            dist.all_reduce(rows, dist.ReduceOp.MAX, group=self._group.device_group)
        try:
            check_slots()
            self.check.after_merge(rows)
        except ReplayError as found:
            error = self._problem or found
            if environment.strict():
                raise error from found
            self._given_up = True
            logger.error("%s. %s=0: the routes are zeros from here on", error, environment.STRICT)
            rows.zero_()
        if self.scheduled and not self._heard:  # no Python ran, only the copies of a captured graph
            self.check.way("graph")
