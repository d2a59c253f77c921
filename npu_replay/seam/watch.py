"""Show each function of torch that a router calls, until its top-k is caught: a TorchFunctionMode.

It costs 2 µs a function, and is on in the first call of each router and where the use of ids is followed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode

from npu_replay.seam.guarded import here
from npu_replay.seam.id_uses import IdUses, run_seen
from npu_replay.seam.torch_state import function_modes

_push: Callable[[Any], None] = torch._C._push_on_torch_function_stack
_pop: Callable[[], Any] = torch._C._pop_torch_function_stack


class Watch(TorchFunctionMode):
    """Shows each function of torch to the armed call, until its top-k, and to the `takers` after it."""

    def enter(self) -> None:
        _push(self)

    def leave(self, depth: int) -> None:
        # A mode of others above Watch stays: popping would remove theirs.
        while function_modes() > depth and self.is_innermost():
            _pop()

    def follow(self, taker: IdUses) -> None:
        """Let `taker` see what torch's functions are given here, but before an armed call's top-k."""
        taker.depth = function_modes()
        here.takers = (*here.takers, taker)
        self.enter()

    def unfollow(self, taker: IdUses) -> None:
        """Undo `follow`, also one that was interrupted."""
        self.leave(taker.depth)
        here.takers = tuple(other for other in here.takers if other is not taker)

    def is_innermost(self) -> bool:
        return overrides._get_current_function_mode() is self  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call = here.call if here.call is not None and here.call.is_armed else None
        # A library's own `topk` may have another name for its scores.
        is_topk = getattr(func, "__name__", "") == "topk" and bool(args or "input" in kwargs)
        if is_topk and not args:
            args = (kwargs.pop("input"),)
        if call is not None and is_topk and call.matches(args[0], args[1:], kwargs):
            return call.answer(func, args[0], args[1:], kwargs, "watch")
        if here.takers and (call is None or call.ids is not None):
            return run_seen(here.takers, func, args, kwargs)
        return func(*args, **kwargs)


watch = Watch()
