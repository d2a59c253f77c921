"""Answer the top-k of a router whose checked calls have shown all that an unchecked one needs to know.

`Call` finds out how a router takes its top-k: through which name, from which frame, under which modes, how
often. A model has up to a hundred routers, and the host's work around each is what a replay costs. So in
unchecked micro-batches a router that has called the guarded name once, on plain scores, is answered here,
without a walk of the stack and without a function mode. The next checked micro-batch looks again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from npu_replay.sessions.guarded import here
from npu_replay.sessions.masks import Fill, unmasked
from npu_replay.sessions.micro_batches import FEW
from npu_replay.sessions.seam import Call, takes_largest_of_rows

_topk_result = torch.return_types.topk


@dataclass(frozen=True)
class Plan:
    """Says how a router takes its top-k in eval mode or in training, as its last closely watched call did.

    Attributes:
        way: `Call.way`; where it is the guard, the function mode stays off.
        is_quick: whether unchecked calls may be quick.
    """

    way: str | None
    is_quick: bool

    @classmethod
    def of(cls, call: Call) -> Plan:
        """Return the plan of the calls that follow one like this, which has ended."""
        plain = call.way == "guard" and not call.again and type(call.scores) is torch.Tensor
        return cls(call.way, plain and not (call.drops or call.spare or call.counts))


class QuickCall(Call):
    """Represents a call that takes its one top-k through the guarded name, on plain scores.

    It begins where no other call is open and no mode of torch's is on.

    Args:
        owner: the calls of one router (`router_calls.py`).
        forward: the forward that it belongs to; None for a recompute.
        enclosed: whether autograd may run the call again.
    """

    seen: Any = ()

    def __init__(self, owner: Any, forward: Any, enclosed: bool = False) -> None:
        self.owner = owner
        self.num_experts = owner.router.num_experts
        self.topk = owner.router.topk
        self.fills: list[Fill] = []
        self.forward = forward
        self.enclosed = enclosed
        self.given = owner.is_given
        if forward is not None:
            self.rows = forward.rows
            self.routes = forward.given
            self.choose = owner.chooses
            self.keeps_native_topk = not enclosed and owner.may_keep_native

    def begin(self) -> None:
        here.armed = here.running = self

    def end(self) -> None:
        here.armed = here.running = None

    def take(self, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scores = args[0] if args else kwargs.get("input")
        k = args[1] if len(args) > 1 else kwargs.get("k")
        if k != self.topk or type(scores) is not torch.Tensor:
            return native(*args, **kwargs)
        shape = scores.shape
        if len(shape) != 2 or shape[1] != self.num_experts or self.rows not in (shape[0], -1):
            return native(*args, **kwargs)
        if (kwargs or len(args) > 2) and not takes_largest_of_rows(args, kwargs):
            return native(*args, **kwargs)
        here.armed = None  # a top-k among our own operations isn't the router's, nor is a later one
        self.rows = shape[0]
        if self.keeps_native_topk:
            values, self.own_ids = native(*args, **kwargs)
            ids = self.choose(self)
        else:
            self.scores = scores
            self.taken_by = native, args, kwargs
            ids = self.choose(self)
            values = unmasked(scores, self.fills if self.given else (), self.topk, ids)
            self.scores = None
        self.ids = ids
        self.way = "guard"
        handed = self.lent
        if handed is None:
            # A tensor made under inference_mode can't be saved for backward. Those of a recompute are kept.
            copies = self.forward is None or ids.numel() > FEW or ids.is_inference()
            handed = ids.clone() if copies else ids
            self.watched = handed
            self.written = None if handed.is_inference() else handed._version
        self.handed = handed
        return _topk_result((values, handed))
