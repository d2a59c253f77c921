"""pin_recompute: make a recompute choose what its own forward chose."""

from __future__ import annotations

import torch

from npu_replay.routers import Model
from npu_replay.sessions import seam
from npu_replay.sessions.block import to_enter
from npu_replay.sessions.micro_batches import Forward
from npu_replay.sessions.session import Session


def pin_recompute(model: Model) -> Pinning:
    """Make activation recompute choose the experts that its own forward chose.

        with npu_replay.pin_recompute(model):
            train()

    Useful without RL: near ties flip in a recompute, and then gradients belong to no forward.

    >>> with npu_replay.pin_recompute(model) as session:
    ...     model(batch).logits.mean().backward()
    >>> session.metrics()["micro_batches"], session.metrics()["routers"]
    (1, 2)

    Args:
        model: the module that the training loop calls, or the list of virtual-pipeline chunks.

    Raises:
        RouterError: on entering, if a router can't be replayed or is in another block.
        RecomputeError: in backward, if a recompute isn't of a forward of this block; on leaving, if one is
            still to come.
    """
    return to_enter(Pinning(model))


class Pinning(Session):
    """Makes every recompute choose what its own forward chose; the forwards choose freely."""

    name = "pin_recompute"
    puts_together = False

    def _choose(self, call: seam.Call) -> torch.Tensor:
        ids = call.own()
        key = call.owner.label, call.forward.number
        if key in self._pending:
            self._kept[key] = ids.to(call.owner.narrow)
        return ids

    def _end(self, chunk: int, output: object) -> tuple[Forward, bool] | None:
        ended = super()._end(chunk, output)
        self._forget_ends()  # a block may last for a whole training run
        return ended
