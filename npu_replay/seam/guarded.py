"""Replace torch's names for top-k and masked_fill while a block is open.

The replacements ask the router's call that this thread is in, and pass on what it doesn't answer. That costs
some 0.2 µs for each top-k and masked_fill of the process. They can't see a name that was taken before
(`from torch import topk`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from npu_replay.seam.id_uses import IdUses
from npu_replay.seam.torch_state import dynamo_forgets, dynamo_knows


class Here(threading.local):
    """Holds the calls of routers (`seam.Call`) that a thread is in."""

    def __init__(self) -> None:  # no class attributes: up to torch 2.10 dynamo treats these as constants
        self.call: Any = None  # the innermost one
        self.takers: tuple[IdUses, ...] = ()


here = Here()


class _Guarded:
    """Replaces a function of torch by one that asks the running call of a router: a top-k, or a fill."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name
        self.native = getattr(owner, name)
        self.own_attribute = name in vars(owner)  # Tensor's is inherited from its C base
        self.answered = self._topk() if name == "topk" else self._fill()
        self.answered.__doc__ = self.native.__doc__

    def _topk(self) -> Callable[..., Any]:
        native = self.native

        def topk(*args: Any, **kwargs: Any) -> Any:
            call = here.call
            if call is not None and call.is_armed and (args or "input" in kwargs):
                return call.take(native, args[0] if args else kwargs.pop("input"), args[1:], kwargs)
            return native(*args, **kwargs)

        return topk

    def _fill(self) -> Callable[..., Any]:
        native, in_place = self.native, self.name.endswith("_")

        def masked_fill(*args: Any, **kwargs: Any) -> Any:
            call = here.call
            if call is not None and call.ids is None and call.is_armed and (args or "input" in kwargs):
                scores = args[0] if args else kwargs.pop("input")
                return call.fill(native, scores, args[1:], kwargs, in_place)
            return native(*args, **kwargs)

        return masked_fill

    def lay_back(self) -> None:
        """Restore the name. If it was wrapped meanwhile, ours stays below and passes all calls on."""
        if getattr(self.owner, self.name) is self.answered:
            if self.own_attribute:
                setattr(self.owner, self.name, self.native)
            else:
                delattr(self.owner, self.name)


_NAMES = (
    (torch, "topk"),
    (torch.Tensor, "topk"),
    (torch, "masked_fill"),
    (torch.Tensor, "masked_fill"),
    (torch.Tensor, "masked_fill_"),
)


class Guard:
    """Replaces torch's names for top-k and masked_fill while at least one block is open.

    It takes no lock, which a fork could leave locked.
    """

    def __init__(self) -> None:
        self._holders: set[object] = set()
        self._dynamo_knew = False
        self._names: list[_Guarded] = []

    def install(self, holder: object) -> None:
        """Replace the names for a holder, until `remove` is called with it; each may be called repeatedly."""
        self._holders.add(holder)
        if not self._names:
            self._dynamo_knew = dynamo_knows()
            self._names = [_Guarded(owner, name) for owner, name in _NAMES]
            for guarded in self._names:
                setattr(guarded.owner, guarded.name, guarded.answered)

    def remove(self, holder: object) -> None:
        """Release a holder. The last one restores the names."""
        self._holders.discard(holder)
        if self._holders or not self._names:
            return
        for guarded in self._names:
            guarded.lay_back()
        self._names = []
        if not self._dynamo_knew:
            dynamo_forgets()


guard = Guard()
