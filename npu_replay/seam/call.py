"""Replace the result of a router's top-k inside a call of the router: the only intervention in a model.

While a call is open, `Call.choose` answers the first top-k over the experts: two-dimensional scores of
the expected shape and the router's k. (Group-limited routing calls another top-k before it, aux losses one
after.) The ids are found without grad and the scores are gathered, also in a record: a non-reentrant
checkpoint compares saved tensors of forward and recompute, so all passes must build the same graph.

Two ways to catch the top-k, measured in docs/dev/architecture.md: `torch.topk` and `torch.Tensor.topk` are
replaced while a session is open (`guarded.py`: cheap, but misses `from torch import topk`); `Watch`, a
TorchFunctionMode, sees every operation, at 2 µs each, and is on in the first call of each router, and where
the use of the ids is followed (`id_uses.py`). The guard also notes the `masked_fill` before the top-k
(`masks.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import overrides

from npu_replay.errors import RouterError
from npu_replay.seam import dropped
from npu_replay.seam.guarded import here
from npu_replay.seam.id_uses import IdUses
from npu_replay.seam.masks import Fill, ruled_out, unmasked
from npu_replay.seam.plan import Plan
from npu_replay.seam.torch_state import address, function_modes, outside_modes
from npu_replay.seam.watch import watch

Choose: TypeAlias = "Callable[[Call], torch.Tensor]"
"""Takes a call, and returns the ids to use, int64 [rows, topk]."""
Native: TypeAlias = "Callable[..., Any]"
"""Is torch's own function, or what somebody has put in its place."""

_modes: Callable[[], list[Any]] = overrides._get_current_function_mode_stack


def armed() -> Call | None:
    """Return the router's call that this thread is in, until its top-k has been answered."""
    call: Call | None = here.call
    return call if call is not None and call.is_armed and call.ids is None else None


def running(owner: object) -> Call | None:
    """Return the innermost open call of this thread that belongs to `owner`."""
    call: Call | None = here.call
    while call is not None and call.owner is not owner:
        call = call.outer
    return call


class Call:
    """Represents one call of one router, open in a `with` block around the router's forward.

    Args:
        owner: what `running` finds the call by: in a session, the calls of its router.
        plan: what is known of the router's calls.
        micro_batch: the one that it belongs to, in a session.
        rows: of the scores; -1: not known.
        choose: returns the ids to use.
        routes: the ids to choose from, as `choose` takes them.
        loses: bool [rows, topk], the ids whose token is dropped over its expert's capacity; None: not known.
        around: all that may run the call again.
        is_recompute: it runs a call of a forward again.
        checked: find out whether a mask that isn't undone rules out a given expert, and in a block without a
            router module what it does with the ids.
        follows: keep Watch on until the call ends, in a block that isn't checked.
        keeps_native_topk: run the own top-k with grad, where no checkpoint compares saved tensors.
    """

    # Class attributes, so that a call sets only what differs:
    has_ended = False  # and its output was seen
    ids: Any = None  # int64 [rows, topk] in use; None before the top-k
    handed: torch.Tensor | None = None  # what the router got; None from a kernel
    watched: torch.Tensor | None = None  # the same, if it is this call's to see that nobody writes into it
    written: int | None = None  # version counter of `watched`; None in inference mode
    way: str | None = None  # how it was caught: "guard", "watch", "inner", or "kernel" (see `note`)
    further = 0  # number of further top-ks of the same shape
    direct: torch.Tensor | None = None  # the given ids, int64, if they are all that the call needs
    shown: Any = None  # what `Router.shows` returned, if it is still to be checked
    scores: Any = None  # the input of the top-k
    taken_by: Any = None  # the function, its arguments behind the scores, and keywords
    own_ids: torch.Tensor | None = None  # the router's own choice of all rows, once computed
    taken: IdUses | None = None  # uses of the ids after the top-k, if `follows`
    ruled_out: torch.Tensor | None = None  # see `masks.ruled_out`
    lost: torch.Tensor | None = None  # bool [rows, topk], the ids whose token was dropped, if it drops
    strayed: torch.Tensor | None = None  # a flag on the device: a kernel chose other ids
    outer: Call | None = None  # the enclosing call
    is_armed = True  # answers the next top-k that matches
    _depth = 0

    def __init__(
        self,
        owner: Any,
        plan: Plan,
        micro_batch: Any = None,
        rows: int = -1,
        *,
        choose: Choose | None = None,
        routes: Any = None,
        loses: torch.Tensor | None = None,
        around: Sequence[Any] = (),
        is_recompute: bool = False,
        checked: bool = False,
        follows: bool = False,
        keeps_native_topk: bool = False,
    ) -> None:
        self.owner = owner
        self.plan = plan
        self.micro_batch = micro_batch
        self.rows = rows
        self.choose: Choose = choose or Call.own
        self.routes = routes
        self.around = around
        self.is_recompute = is_recompute
        self.follows = plan.is_block and (checked or follows)
        self.keeps_native_topk = keeps_native_topk
        self.watching = plan.way != "guard"  # Watch is on, until the top-k is caught
        self.fills: Sequence[Fill] = ()  # of scores over the experts, before the top-k
        self._loses = loses
        self._looks_for_masks = checked and plan.is_given and plan.masks

    def end(self, shown: Any = None) -> None:
        """End the call; `shown` is what `Router.shows` returned, if it is still to be checked."""
        self.shown = shown
        self.has_ended = True

    def learned(self) -> Plan:
        """Return the plan of the calls that follow this one, which has ended."""
        plan = self.plan
        plain = self.way == "guard" and not self.further and type(self.scores) is torch.Tensor
        if not plain or plan.drops or plan.spare or plan.is_block:
            return replace(plan, way=self.way, is_quick=False)
        _, args, kwargs = self.taken_by
        return replace(plan, way=self.way, is_quick=True, args=args, kwargs=kwargs)

    def __enter__(self) -> None:
        """Answer the next top-k of this thread that matches."""
        self.watching |= self.follows
        self.outer = here.call
        self._depth = function_modes()
        here.call = self
        if self.watching:
            watch.enter()

    def __exit__(self, *_: object) -> None:
        if self.watching:
            watch.leave(self._depth)
        if self.taken is not None:
            watch.unfollow(self.taken)
        here.call = self.outer

    def matches(self, scores: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the call answers a top-k of these scores, with these arguments behind them."""
        plan = self.plan
        if not isinstance(scores, torch.Tensor) or scores.shape != (self.rows, plan.num_experts):
            return False
        if plan.drops and self.ids is not None:  # the next one asks which tokens to drop
            fits = takes_largest_of_rows(args, kwargs, dims=(0, -2))
        else:
            fits = _k(args, kwargs) == plan.topk + plan.spare and takes_largest_of_rows(args, kwargs)
        if not fits:
            return False
        # The stack is walked, not indexed: a wrapper more or less must not matter.
        frame = None if plan.inside is None or self.keeps_native_topk else sys._getframe()
        while frame is not None and frame.f_code is not plan.inside:
            if frame.f_code.co_name == "checkpoint":
                # That recompute would be no call of the router, and choose anew.
                raise RouterError(
                    "the router takes its top-k in a checkpoint of its own",
                    cause="a router that saves memory: checkpoint its caller instead",
                )
            frame = frame.f_back
        return True

    def take(self, native: Native, scores: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a top-k of the guarded name, and answer it if it is the router's."""
        if self.matches(scores, args, kwargs):
            return self.answer(native, scores, args, kwargs, "guard")
        return native(scores, *args, **kwargs)

    def _stopwatching(self) -> None:
        """Leave Watch once the top-k is caught; from inside Watch this has no effect."""
        # The rest of the router runs without a mode, for which its compiled functions would compile again.
        # Inside Watch torch has popped it, and pushes it back.
        if self.watching and not self.follows and watch.is_innermost():
            watch.leave(self._depth)
            self.watching = False

    def answer(
        self, native: Native, scores: Any, args: tuple[Any, ...], kwargs: dict[str, Any], way: str
    ) -> Any:
        """Answer the top-k, once: later ones in this call are the router's own."""
        # Disarmed while our own operations run: a top-k among them is not the router's.
        self.is_armed = False
        if self.ids is not None:
            again = self._drop if self.plan.drops else self._answer_again
            return again(native, scores, args, kwargs, self.ids)
        if way == "guard":
            self._stopwatching()
        if type(scores).__name__ == "DTensor":
            raise RouterError(
                "the scores are a DTensor, which replay doesn't support",
                expected="plain tensors in the router",
                got=f"{scores.placements}",
                cause="tensor parallelism by parallelize_module over the router; FSDP2 alone is fine",
            )
        self.scores = scores
        self.taken_by = native, args, kwargs
        values, ids = self.decide(scores)
        if self.plan.spare:
            values, places = self.native_topk(scores)
            self.handed = torch.cat([ids, places[:, self.plan.topk :]], dim=1)
            self.fills = ()  # the router got its top-k's own values, so no mask is undone
        if (handed := self.handed) is None:
            with outside_modes():
                handed = self.handed = ids.clone()  # which the router may write into
        self.ids = ids
        self.way = way
        self.watched = handed
        self.written = None if handed.is_inference() else handed._version
        if self.follows:
            self.taken = IdUses(self.rows, self.plan.topk, self.plan.num_experts, ids)
            self.taken.depth = self._depth
            here.takers = (*here.takers, self.taken)
        if self.plan.is_given:
            self._answered = _identity(scores)
        comes_again = self.plan.is_given and not self.plan.spare
        self.is_armed = bool(self.plan.is_block or self.plan.drops or comes_again)
        return torch.return_types.topk((values, handed))

    def _answer_again(self, native: Native, scores: Any, args: Any, kwargs: Any, ids: torch.Tensor) -> Any:
        """Answer a further top-k: one of the same scores has the same ids, another is the router's own."""
        self.further += 1
        plan = self.plan
        try:
            if plan.is_given and _identity(scores) == self._answered and (handed := self.handed) is not None:
                # Not the values of before: they may have been made without grad, or written into.
                values = unmasked(scores, self.fills, plan.topk, handed, plan.leaves)
                return torch.return_types.topk((values if scores.requires_grad else values.detach(), handed))
            return native(scores, *args, **kwargs)
        finally:
            self.is_armed = True

    def _drop(self, native: Native, scores: Any, args: Any, kwargs: Any, ids: torch.Tensor) -> Any:
        """Choose the tokens that keep their place at each expert, and note which ids lost theirs."""
        answer = native(scores, *args, **kwargs)
        if self.plan.is_given and scores.is_floating_point():
            if self._loses is None:
                dropped.warn()
            with outside_modes():
                again = lambda lifted: native(lifted, *args, **kwargs)  # noqa: E731
                places = dropped.kept_places(scores.detach(), answer[1], ids, self._loses, again)
            answer = torch.return_types.topk((scores.gather(0, places), places))
        with outside_modes():
            placed = torch.zeros_like(scores, dtype=torch.bool).scatter(0, answer[1], True)
            self.lost = ~placed.gather(1, ids)
        return answer

    def note(self, ids: torch.Tensor) -> None:
        """Record the ids that a kernel chose, int64 [rows, topk], where no top-k can be answered."""
        self.own_ids = ids
        wanted = self.choose(self)  # differs from `ids` where a recompute chose otherwise
        if wanted is not ids:
            self.strayed = (wanted != ids).any()
        self.answered(ids, "kernel")

    def answered(self, ids: torch.Tensor, way: str) -> None:
        """Note the ids [rows, topk] that the router goes on with, and how they were caught."""
        self.ids = ids
        self.way = way

    def decide(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return values, float [rows, topk], and ids for the router's top-k of these scores."""
        if self.keeps_native_topk:
            values, self.own_ids = self.native_topk(scores)
        elif not self.plan.is_given and (
            torch._C._len_torch_dispatch_stack()
            or type(scores) is not torch.Tensor
            or (function_modes() and any(mode is not watch for mode in _modes()))
        ):
            # Another mode, or a subclass of Tensor, may answer the top-k, or count operations in both passes.
            self.own()
        with outside_modes():
            ids = self.choose(self)
            if self._looks_for_masks:
                self.ruled_out = ruled_out(scores, self.fills, ids, self.own())
        if not self.keeps_native_topk:
            values = unmasked(scores, self.fills, self.plan.topk, ids, self.plan.leaves)
        return values, ids

    def own(self, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return the router's own choice, int64 [rows, topk], of all rows or of these."""
        if self.own_ids is not None:
            return self.own_ids if rows is None else self.own_ids.index_select(0, rows)
        scores = self.scores.detach()  # half the cost of no_grad()
        ids: torch.Tensor = self.native_topk(scores if rows is None else scores.index_select(0, rows))[1]
        if self.plan.spare:
            ids = ids[:, : self.plan.topk]
        if rows is None:
            self.own_ids = ids
        return ids

    def native_topk(self, scores: torch.Tensor) -> Any:
        native, args, kwargs = self.taken_by
        return native(scores, *args, **kwargs)

    def fill(
        self, native: Native, scores: Any, args: tuple[Any, ...], kwargs: dict[str, Any], in_place: bool
    ) -> Any:
        """Run a `masked_fill`, and keep the scores before it: given experts may be among those it fills."""
        plan = self.plan
        shape = self.rows, plan.num_experts
        # An inner call that records keeps them for the outer one, which takes them over.
        is_given = plan.is_given or (self.outer is not None and self.outer.plan.is_given)
        if not is_given or not isinstance(scores, torch.Tensor):
            return native(scores, *args, **kwargs)
        has_shape = scores.shape == shape
        # Routers that mask whole groups may fill a view [rows, groups, experts of a group].
        if not has_shape and (scores.shape[:1] != shape[:1] or scores.shape[1:].numel() != shape[1]):
            return native(scores, *args, **kwargs)
        before = scores
        if in_place:
            with outside_modes():
                before = scores.clone()
        known = len(self.fills)
        after = native(scores, *args, **kwargs)
        if len(self.fills) > known:
            return after  # under a mode torch looks the function up by its name, and has called this again
        fill = Fill.of(before, after, args[0] if args else kwargs["mask"])
        if not has_shape:
            with outside_modes():
                fill = Fill.of(*(part.expand(scores.shape).reshape(shape) for part in fill[:3]))
        self.fills = [*self.fills, fill]
        return after


def takes_largest_of_rows(
    args: tuple[Any, ...], kwargs: dict[str, Any], dims: tuple[int, int] = (-1, 1)
) -> bool:
    """Return whether a call of topk takes the largest scores along one of these dimensions."""
    dim = args[1] if len(args) > 1 else kwargs.get("dim", -1)
    largest = args[2] if len(args) > 2 else kwargs.get("largest", True)
    return dim in dims and bool(largest) and "out" not in kwargs


def _k(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs.get("k")


def _identity(scores: torch.Tensor) -> tuple[object, ...]:
    """Return address and strides of scores, and their version, which inference tensors don't have."""
    return address(scores), scores.stride(), None if scores.is_inference() else scores._version
