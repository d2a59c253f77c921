"""The rows of a step: each rank writes what its layers chose, and one all_reduce puts them together.

Nothing is collected while the model runs: a copy into a buffer that stays is all that a captured graph holds.
Each row is written by one rank. On the others it stays at the ground level, and MAX over the tensor-parallel
group fills it. Where all ranks choose for all tokens, it is the first rank's: after a sum whose order differs
from rank to rank, two near experts may change places, and MAX of both orders is neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from npu_replay import environment
from npu_replay.compat.vllm_ascend.placing import Layout, place
from npu_replay.errors import ReplayError

if TYPE_CHECKING:
    from npu_replay.compat.vllm_ascend.self_check import Choice, SelfCheck

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Entry:
    """A layer's tokens as they came in, before they are gathered or split.

    Attributes:
        rows: how many came in.
        logits: the router's, of those tokens; shape (rows, experts). None where nothing is held against them:
            a graph's memory isn't kept for it.
        sharded: are they one tensor-parallel rank's part (sequence parallelism)?
        keeps_all: does each tensor-parallel rank go on with all of them?
    """

    rows: int
    logits: torch.Tensor | None
    sharded: bool = False
    keeps_all: bool = False


class Capture:
    """What one worker captures.

    Args:
        buffer: vLLM's, int32; shape (tokens, decoder layers, k).
        check: holds the first steps against the routers' logits.
        group: the tensor-parallel group, where its ranks may have different rows; else None.
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
        """A layer's rows can't be placed. Nothing is raised here: the other ranks would wait for this one in
        the model. Rows that nobody wrote are an error on all ranks, or zeros, which the reader refuses."""
        if self._problem is None:
            self._problem = problem
            logger.error("%s. Its rows are left out", problem)
        self.entry = None

    def enter(self, logits: torch.Tensor, *, sharded: bool = False, keeps_all: bool = False) -> Entry:
        """A layer's tokens come in."""
        kept = logits if self.check.compares else None
        self.entry = Entry(logits.shape[0], kept, sharded, keeps_all)
        return self.entry

    def begin(self, scheduled: int) -> None:
        """A step starts that runs so many tokens of this rank."""
        self.scheduled, self._merged, self._heard = scheduled, False, False
        self.check.begin()
        self.clear()

    @torch.inference_mode()
    def clear(self) -> None:
        """No row of an earlier step is left where this one's are read."""
        self.buffer[: self.scheduled].fill_(self.check.ground)

    def take(self, layer: int, ids: torch.Tensor, choice: Choice | None, layout: Layout) -> None:
        """Write what a layer chose, where it belongs.

        Args:
            layer: the decoder layer's number.
            ids: the experts of the tokens that this rank routes; shape (rows, k or more). Columns after the
                k-th are shared experts that run as routed ones.
            choice: how they were chosen, where that is known.
            layout: whose tokens they are.
        """
        most, _, top_k = self.buffer.shape
        self._heard = True
        if not self._merged:  # before what may fail on this rank alone: all look at the same steps
            self.check.way(layout.comm)
        try:
            first, tokens, row = place(layout, ids.shape[0])
        except ReplayError as error:
            self.fail(error.at(f"layer {layer}"))
            return
        tokens = min(tokens, most - row)
        others = self._group is not None and layout.whole and layout.tp_rank > 0
        if tokens > 0 and not others:
            self.buffer[row : row + tokens, layer].copy_(ids[first : first + tokens, :top_k])
        logits = self.entry.logits if self.entry is not None else None
        if choice is not None and logits is not None and not self._merged:
            self.check.expect(layer, logits, choice, layout.begin)
        self.entry = None

    @torch.inference_mode()
    def finish(self, check_slots: Callable[[], None] = lambda: None) -> None:
        """Put the rows of all ranks together; in the first steps, check them. Once a step.

        Args:
            check_slots: raises if the slots under which they are kept aren't theirs.

        Raises:
            ReplayError: what came isn't what the routers chose. NPU_REPLAY_STRICT=0 logs it and gives zeros,
                which the reader of the routes refuses.
        """
        if self._merged:
            return
        self._merged = True
        rows = self.buffer[: self.scheduled]
        if self._given_up:
            rows.zero_()
            return
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
        if self.scheduled and not self._heard:  # no Python ran: the copies of a captured graph did
            self.check.way("graph")
