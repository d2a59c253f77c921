"""The one thing that is replaced: what a router's top-k returns, inside one call of the router.

While a call is armed, the first top-k over the experts is answered by `Call.choose`: two-dimensional
scores, the last dimension as long as there are experts, k the router's, as many rows as the router was
given. (A router with one group calls another top-k before it, and the aux loss another one after.)
Every pass in a checkpoint has one autograd shape: the ids are found without grad and the scores gathered, in
a record too, else a non-reentrant one finds other saved tensors in its recompute.

Two ways to catch that top-k, measured in docs/dev/architecture.md:

- `torch.topk` and `torch.Tensor.topk` are answered through a thread-local while any session is open. Costs
  least. It can't see a name that somebody took earlier (`from torch import topk`).
- `Watch`, a TorchFunctionMode around the router, sees everything, at two microseconds an operation. It is
  on where scores are masked before the top-k (it has to see the masking), as a safety net in the
  first call of each router, and to the end of a call that is followed (`taken.py`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

import torch
from torch import overrides
from torch.overrides import TorchFunctionMode

from npu_replay.errors import RouterError
from npu_replay.sessions import compiler_names
from npu_replay.sessions.hooks import outside_modes
from npu_replay.sessions.masks import Masks, Path, address
from npu_replay.sessions.taken import Taken, run_seen

Choose: TypeAlias = "Callable[[Call], torch.Tensor]"
"""Given the call, whose `own` is the router's own choice, the ids to use: int64 [rows, topk]."""

_depth: Callable[[], int] = torch._C._len_torch_function_stack
_push: Callable[[Any], None] = torch._C._push_on_torch_function_stack
_pop: Callable[[], Any] = torch._C._pop_torch_function_stack
_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack


class _Here(threading.local):
    def __init__(self) -> None:  # up to torch 2.10 dynamo takes a class attribute for a constant
        self.armed: Call | None = None
        self.running: Call | None = None
        self.takers: tuple[Taken, ...] = ()


_here = _Here()


def armed() -> Call | None:
    """The router's call that this thread is in, as long as its top-k hasn't come."""
    call = _here.armed
    return call if call is not None and call.ids is None else None


def arm(call: Call | None) -> None:
    """Have this call answer the next top-k of this thread that fits; None: nobody."""
    _here.armed = call


def is_running() -> bool:
    """Is this thread in a router's call, or was it left in one by an interrupt?"""
    return _here.running is not None


def running(owner: object) -> Call | None:
    """The innermost call of this thread that this owner has begun and not ended."""
    call = _here.running
    while call is not None and call.owner is not owner:
        call = call.below
    return call


def unwind(block: object) -> None:
    """End the calls of a block whose forward hooks never ran, as an interrupt (KeyboardInterrupt) skips them.

    Where no call runs and nothing is followed, nothing needs Watch any more.
    """
    call = _here.running
    while call is not None:
        if getattr(call.owner, "block", None) is block:
            call.end()
        call = call.below
    if _here.running is None and not _here.takers:
        _watch.leave(0)


def follow(taker: Taken) -> None:
    """Let it see what this thread gives to torch's functions, but for those before an armed call's top-k."""
    taker.depth = _depth()
    _here.takers = (*_here.takers, taker)
    _watch.enter()


def unfollow(taker: Taken) -> None:
    """Undo `follow`, also one that was left half way."""
    _watch.leave(taker.depth)
    _dismiss(taker)


def _dismiss(taker: Taken) -> None:
    _here.takers = tuple(one for one in _here.takers if one is not taker)


class Call:
    """One call of one router, from its forward pre-hook to its forward hook.

    Args:
        rows: how many rows the scores have.
        num_experts: how many columns.
        topk: the router's k.
        choose: gives the ids to use.
        masks: this router masks its scores before the top-k; needs `watch`.
        watch: also enter `Watch`, until the top-k was caught.
        given: the ids may be others than the router would choose.
        paths: see Masks.

    Attributes:
        ids: int64 [rows, topk] that were used; None until the top-k has come.
        handed: what the router got, which it may write into: a copy of `ids` if it `keeps` these to itself,
            or another that `choose` has set. None from a kernel.
        written: see `is_written`.
        again: how many top-ks like the one that was answered came after it, where `counts` says to count.
        way: how it was caught, "guard" or "watch"; None before.
        values: what the router got beside the ids, float [rows, topk].
        scores: what the top-k was asked over.
        own_ids: the router's own choice of all rows, where anybody has asked for it.
        chooses_itself: what is wanted is the router's own choice, now or in the forward of this recompute.
        seen: what the router called until its top-k was caught, as far as it was watched.
        follows: Watch stays on to the end of the call.
        taken: what was given to functions after the top-k, of a call that is followed; None before.
        ruled_out: see Masks.ruled_out.
        strayed: a flag on the device that a kernel chose others than were wanted; None from a top-k.
        free: no checkpoint can compare what this call saves with its recompute, and the ids are the router's
            own: so its top-k runs as it is.
        owner, expected, forward, number, routes: for whoever begins the call.
        inside: the frame that runs the router: an interrupt skips the forward hook, and a call whose frame
            has gone answers nothing any more. None: it always answers.
        below: the call that this one lies in.
    """

    ids: torch.Tensor | None = None
    handed: torch.Tensor | None = None
    keeps = True
    written: int | None = None
    again = 0
    counts = False
    way: str | None = None
    values: torch.Tensor | None = None
    scores: Any = None
    own_ids: torch.Tensor | None = None
    chooses_itself = False
    follows = False
    taken: Taken | None = None
    ruled_out: torch.Tensor | None = None
    strayed: torch.Tensor | None = None
    free = False
    owner: Any = None
    expected: str | None = None
    number = 0
    forward: Any = None
    routes: Any = None
    inside: FrameType | None = None
    below: Call | None = None
    _outer: Call | None = None
    _depth = 0

    def __init__(
        self,
        rows: int,
        num_experts: int,
        topk: int,
        choose: Choose,
        *,
        masks: bool = False,
        watch: bool = False,
        given: bool = False,
        paths: dict[tuple[str, ...], Path] | None = None,
    ) -> None:
        self.rows = rows
        self.num_experts = num_experts
        self.topk = topk
        self.choose = choose
        self.watching = watch
        self.given = given
        self.seen: list[str] = []
        self.made = Masks(rows, num_experts, paths) if masks else None

    def begin(self) -> None:
        """From now on the top-k of this thread is answered."""
        self.watching |= self.follows
        self._outer, self.below, self._depth = _here.armed, _here.running, _depth()
        _here.armed = _here.running = self
        if self.watching:
            _watch.enter()

    def end(self) -> None:
        """The router's call is over. An interrupt may have come since it began, or in `end` itself."""
        if self.watching:
            _watch.leave(self._depth)
        if self.taken is not None:
            _dismiss(self.taken)
        _here.armed, _here.running = self._outer, self.below

    def matches(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Is this top-k one that the call answers?"""
        count = len(args)
        scores = args[0] if count else kwargs.get("input")
        return (
            isinstance(scores, torch.Tensor)
            and scores.shape == (self.rows, self.num_experts)
            and self._wants(
                args[1] if count > 1 else kwargs.get("k"), args[2] if count > 2 else kwargs.get("dim", -1)
            )
            and kwargs.get("largest", True)
            and "out" not in kwargs
            and self._is_running()
        )

    def _wants(self, k: object, dim: object) -> bool:
        """Is a top-k of this k and dimension the routing decision?"""
        return k == self.topk and dim in (-1, 1)

    def _is_running(self) -> bool:
        """Is the router's frame still among those that called this? If not, the call is left for good."""
        if self.inside is None:
            return True
        frame: FrameType | None = sys._getframe(3)
        while frame is not None:
            if frame is self.inside:
                return True
            frame = frame.f_back
        _here.armed = self._outer
        self._stop_watching()
        return False

    def _stop_watching(self) -> None:
        """Leave Watch before the call ends: what follows in the router runs as ever, and its compiled
        functions would compile anew for a mode. From inside Watch it can't be left: torch pushes it back."""
        if self.watching and not self.follows and _watch.is_innermost():
            _watch.leave(self._depth)
            self.watching = False

    def answer(
        self, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], way: str
    ) -> Any:
        """Answer the top-k, once: later ones in this call are the router's own business."""
        _here.armed = None
        if self.ids is not None:
            return self._answer_again(native, args, kwargs)
        if way == "guard":
            self._stop_watching()
        scores = args[0] if args else kwargs.pop("input")
        if type(scores).__name__ == "DTensor":
            raise RouterError(
                "the scores are a DTensor, which replay doesn't support",
                expected="plain tensors in the router",
                got=f"DTensor with placements {getattr(scores, 'placements', '?')}",
                cause="tensor parallelism by parallelize_module over the router; FSDP2 alone is fine",
            )
        self.scores, self._native, self._args, self._kwargs = scores, native, args[1:], kwargs
        values, ids = self._decide(scores)
        if (handed := self.handed) is None:
            self.handed = handed = self._to_hand(ids) if self.keeps else ids
        self.values, self.ids, self.way = values, ids, way
        if not handed.is_inference():
            self.written = handed._version
        if self.follows:
            self.taken = Taken(self.rows, self.topk, self.num_experts, ids)
            _here.takers = (*_here.takers, self.taken)
        if self.given:
            self._asked = address(scores), None if scores.is_inference() else scores._version
        _here.armed = self if self.counts or self.given else None
        return torch.return_types.topk((values, handed))

    def _to_hand(self, ids: torch.Tensor) -> torch.Tensor:
        with outside_modes():
            return ids.clone()

    def _answer_again(self, native: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A further top-k, which is counted. Of the same scores it has the same answer."""
        self.again += 1
        scores = args[0] if args else kwargs["input"]
        asked = address(scores), None if scores.is_inference() else scores._version
        try:
            if self.given and asked == self._asked and (ids := self.handed) is not None:
                values = self.values if scores is self.scores else scores.gather(1, ids)
                return torch.return_types.topk((values, ids))  # type: ignore[arg-type]
            return native(*args, **kwargs)
        finally:
            _here.armed = self

    def _decide(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the top-k returns: values and ids."""
        if self.free:
            values, self.own_ids = self._native(scores, *self._args, **self._kwargs)
        elif self.chooses_itself and _others_answer(scores):
            # In a recompute for nothing, but a mode of somebody's may count operations in both passes.
            self.own_ids = self._native_ids(scores.detach())
        with outside_modes():
            ids = self.choose(self)
            if self.given and self.made is not None:
                self.ruled_out = self.made.ruled_out(scores, self.own, ids)
        return values if self.free else self.unmasked(scores, lambda part: part.gather(1, ids)), ids

    def own(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """The router's own choice, int64 [rows, topk], of all rows or of these. Costs a top-k, once."""
        if self.own_ids is not None:
            return self.own_ids if rows is None else self.own_ids.index_select(0, rows)
        scores = self.scores.detach()  # half the price of no_grad()
        if rows is not None:
            return self._native_ids(scores.index_select(0, rows))
        self.own_ids = self._native_ids(scores)
        return self.own_ids

    def _native_ids(self, scores: torch.Tensor) -> torch.Tensor:
        ids: torch.Tensor = self._native(scores, *self._args, **self._kwargs)[1]
        return ids

    def unmasked(
        self, scores: torch.Tensor, take: Callable[[torch.Tensor], torch.Tensor] = lambda part: part
    ) -> torch.Tensor:
        """Return what `take` takes of the scores: of those before a mask where other experts may be given."""
        made = self.made if self.given else None
        return take(scores) if made is None else made.unmasked(scores, self.own, take)


def _others_answer(scores: torch.Tensor) -> bool:
    """May a mode of somebody's answer the top-k, or a subclass of Tensor?"""
    if torch._C._len_torch_dispatch_stack() or type(scores) is not torch.Tensor:
        return True
    return bool(_depth()) and any(mode is not _watch for mode in _modes())


class Watch(TorchFunctionMode):
    """Sees every operation inside a router's call."""

    def enter(self) -> None:
        _push(self)

    def leave(self, depth: int) -> None:
        """Come off torch's stack down to this depth, but not from under a mode of somebody else's."""
        while _depth() > depth and self.is_innermost():
            _pop()

    def is_innermost(self) -> bool:
        return overrides._get_current_function_mode() is self  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        call, name = _here.armed, getattr(func, "__name__", "")
        if call is not None and name == "topk" and call.matches(args, kwargs):
            return call.answer(func, args, kwargs, "watch")
        if call is None or call.ids is not None:
            takers = _here.takers
            return run_seen(takers, func, args, kwargs) if takers else func(*args, **kwargs)
        call.seen.append(name)
        return func(*args, **kwargs) if call.made is None else call.made.run(func, args, kwargs)


_watch = Watch()


class _Guarded:
    """One of torch's two names for top-k, answered through the armed call of this thread, if there is one."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.own_attribute = "topk" in vars(owner)  # Tensor's is inherited from its C base
        self.native = native = owner.topk
        self._is_laid = False

        def topk(*args: Any, **kwargs: Any) -> Any:
            call = _here.armed
            if call is None:
                if not guard.is_open:  # who wrapped it inside a block has laid it back after the block
                    self.lay_back()
                return native(*args, **kwargs)
            if not call.matches(args, kwargs):
                return native(*args, **kwargs)
            return call.answer(native, args, kwargs, "guard")

        topk.__doc__ = native.__doc__
        self.answered = topk

    def lay_on(self) -> None:
        """Take the name, once."""
        if not self._is_laid:
            self.owner.topk = self.answered
            self._is_laid = True

    def lay_back(self) -> None:
        """Give the name back, unless it was wrapped meanwhile: then ours stays below and passes all on."""
        if self.owner.topk is not self.answered:
            return
        if self.own_attribute:
            self.owner.topk = self.native
        else:
            del self.owner.topk


class _Guard:
    """torch's two names for top-k, replaced while at least one block is open.

    It takes no lock, which an interrupt could leave locked: each step may be taken twice, by whoever comes.
    """

    def __init__(self) -> None:
        self._holders: set[object] = set()
        self._dynamo_knew = False
        self._names: list[_Guarded] = []
        self.is_open = False

    def install(self, holder: object) -> None:
        """Hold the names, until `remove` is called as often as you like with the same holder."""
        self._holders.add(holder)
        if not self.is_open:
            for left in self._names:
                left.lay_back()
            self._dynamo_knew = compiler_names.dynamo_knows()
            self._names = [_Guarded(torch), _Guarded(torch.Tensor)]
            compiler_names.teach_script(self._names[0].answered, "topk")
            self.is_open = True
        for name in self._names:
            name.lay_on()

    def remove(self, holder: object) -> None:
        """Hold them no more. The last holder gives them back."""
        self._holders.discard(holder)
        if self._holders or not self.is_open:
            return
        for name in self._names:
            name.lay_back()
        compiler_names.unteach_script(self._names[0].answered, self._names[0].native, "topk")
        if not self._dynamo_knew:
            compiler_names.dynamo_forgets()
        self.is_open = False
        if self._holders:  # another thread's, which came in between
            self.install(self)
            self._holders.discard(self)


guard = _Guard()
