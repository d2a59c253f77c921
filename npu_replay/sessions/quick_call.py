"""Answer the top-k of a router whose checked calls have shown all that an unchecked one needs to know.

`Call` finds out how a router takes its top-k: through which name, from which frame, under which modes, how
often. A model has up to a hundred routers, and the host's work around each is what a replay costs. So in
unchecked micro-batches a router that has called the guarded name once, on plain scores, is answered here,
without a walk of the stack and without a function mode. The next checked micro-batch looks again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from npu_replay.sessions.guarded import here
from npu_replay.sessions.masks import unmasked
from npu_replay.sessions.micro_batches import FEW
from npu_replay.sessions.seam import Call, topk_arguments

_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


def may_be_quick() -> bool:
    """Return whether no mode would see the operations of a quick call."""
    return not (_dispatch_modes() or _function_modes())


def was_plain(call: Call) -> bool:
    """Return whether the calls that follow one like this, which has ended, may be quick."""
    plain = call.way == "guard" and not call.again and type(call.scores) is torch.Tensor
    return plain and not (call.drops or call.spare or call.counts)


class QuickCall(Call):
    """Represents a call that takes its one top-k through the guarded name, on plain scores."""

    def begin(self) -> None:
        self.outer, self.below = here.armed, here.running
        here.armed = here.running = self

    def end(self) -> None:
        here.armed, here.running = self.outer, self.below

    def matches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        scores, k, dim = topk_arguments(args, kwargs)
        return (
            k == self.topk
            and isinstance(scores, torch.Tensor)
            and scores.dim() == 2
            and scores.shape[1] == self.num_experts
            and self.rows in (scores.shape[0], -1)
            and dim in (-1, 1)
            and kwargs.get("largest", True)
            and "out" not in kwargs
        )

    def answer(
        self, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], way: str
    ) -> Any:
        here.armed = None  # a top-k among our own operations isn't the router's, nor is a later one
        scores = args[0] if args else kwargs.pop("input")
        self.scores, self._native, self.asked = scores, native, (args[1:], kwargs)
        if self.keeps_native_topk:
            values, self.own_ids = native(scores, *args[1:], **kwargs)
            ids = self.choose(self)
        else:
            ids = self.choose(self)
            values = unmasked(scores, self.fills if self.given else (), self.topk, ids)
        handed = self.handed
        if handed is None:
            copies = self.keeps or ids.numel() > FEW or ids.is_inference()
            handed = ids.clone() if copies else ids
            self.handed = handed
        self.ids, self.way = ids, way
        self.written = None if handed.is_inference() else handed._version
        return torch.return_types.topk((values, handed))
