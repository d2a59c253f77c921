"""pin_recompute: make a recompute choose what its own forward chose."""

from __future__ import annotations

import torch

from npu_replay.routers import Model, Router
from npu_replay.sessions import seam
from npu_replay.sessions.micro_batches import Forward
from npu_replay.sessions.session import Session, narrowed
from npu_replay.sessions.witness import Key


def pin_recompute(model: Model) -> Pinning:
    """Make activation recompute choose the experts that its own forward chose.

        with npu_replay.pin_recompute(model):
            train()

    Useful without RL: near ties flip in a recompute, and then gradients belong to no forward.
    """
    return Pinning(model)


class Pinning(Session):
    """Makes every recompute choose what its own forward chose; the forwards choose freely."""

    name = "pin_recompute"

    def _live(self, router: Router, forward: Forward, rows: int, device: torch.device) -> seam.Choose:
        key = router.label, forward.number

        def choose(own: seam.Own) -> torch.Tensor:
            ids = own()
            if key in self._pending:
                self._kept[key] = narrowed(ids, router)
            return ids

        return choose

    def _release(self, key: Key) -> None:
        super()._release(key)
        if not self._pending:
            self._timeline.forget()  # a block may last for a whole training run
