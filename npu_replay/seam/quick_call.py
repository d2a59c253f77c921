"""Answer the top-k of a router whose checked calls have shown all that an unchecked one needs to know.

`Call` finds out how a router takes its top-k: through which name, from which frame, under which modes, how
often. A model has up to a hundred routers, and the host's work around each is what a replay costs. So in
unchecked micro-batches a router that has called the guarded name once, on plain scores, is answered here,
without a walk of the stack and without a function mode. The next checked micro-batch looks again.

Between two kernels each line of Python costs several times what it costs in a loop, whose code and data are
in the processor's caches. So the calls of a micro-batch are made when it begins (`RouterCalls.prepare`), and
what they show is kept and checked when it ends (`Answering.ends`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from npu_replay.seam.call import Call, Choose, Native, takes_largest_of_rows
from npu_replay.seam.masks import Fill, unmasked
from npu_replay.seam.plan import Plan

FEW = 2**17
"""Up to this number of ids, a router gets the tensor itself: a copy of each costs a kernel (1 MB)."""

LARGE = 2**20
"""Up to this number of elements, a router's output is held until its forward ends (1 MB of a mask).

The outputs of all routers are then checked together. A larger one is checked at once: a device that computes
it isn't waiting for the host.
"""

Tensor = torch.Tensor
_topk_result = torch.return_types.topk


class QuickCall(Call):
    """Represents a call that takes its one top-k through the guarded name, on plain scores.

    It begins where no other call is open and no mode of torch's is on. `RouterCalls` enters and leaves it.

    Args:
        owner: the calls of one router (`router_calls.py`).
        plan, micro_batch, rows, choose, routes, is_recompute, keeps_native_topk: see `Call`.
        direct: the given ids, int64 [rows, topk], if they are all that the call needs.
    """

    fills: Sequence[Fill] = ()
    around: Sequence[Any] = ()
    watching = follows = False

    def __init__(
        self,
        owner: Any,
        plan: Plan,
        micro_batch: Any,
        rows: int,
        choose: Choose,
        routes: Any,
        direct: torch.Tensor | None,
        is_recompute: bool,
        keeps_native_topk: bool,
    ) -> None:
        self.owner = owner
        self.plan = plan
        self.micro_batch = micro_batch
        self.rows = rows
        self.choose = choose
        self.routes = routes
        self.direct = direct
        self.is_recompute = is_recompute
        self.keeps_native_topk = keeps_native_topk

    def _fits(self, scores: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether these are the arguments of the router's top-k."""
        plan = self.plan
        shape = scores.shape if type(scores) is Tensor else ()
        if len(shape) != 2 or shape[1] != plan.num_experts or self.rows not in (shape[0], -1):
            return False
        if args == plan.args and kwargs == plan.kwargs:  # those of the checked call
            return True
        k = args[0] if args else kwargs.get("k")
        return k == plan.topk and takes_largest_of_rows(args, kwargs)

    def take(self, native: Native, scores: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        plan = self.plan
        if self.ids is not None or not self._fits(scores, args, kwargs):
            # Another top-k than the router's, or a later one.
            return native(scores, *args, **kwargs)
        self.way = "guard"
        self.rows = scores.shape[0]
        fills = self.fills
        self.fills = ()  # their graph must not live on: the next router gets the memory
        if (ids := self.direct) is not None:
            self.ids = self.handed = ids  # `Given.untouched` tells whether the router writes into them
            values = unmasked(scores, fills, plan.topk, ids, plan.leaves) if fills else scores.gather(1, ids)
            return _topk_result((values, ids))
        if self.keeps_native_topk:
            values, ids = native(scores, *args, **kwargs)
            self.own_ids = ids
        else:
            self.scores = scores
            self.taken_by = native, args, kwargs
            ids = self.choose(self)
            values = unmasked(scores, fills, plan.topk, ids, plan.leaves)
            self.scores = None
            self.taken_by = None
        self.ids = ids
        # A tensor made under inference_mode can't be saved for backward. Those of a recompute are kept.
        copies = self.is_recompute or ids.numel() > FEW or ids.is_inference()
        self.handed = self.watched = handed = ids.clone() if copies else ids
        self.written = None if handed.is_inference() else handed._version
        return _topk_result((values, handed))
