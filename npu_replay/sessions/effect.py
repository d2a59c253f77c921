"""Check the effect of a replay, not the interception: the routers' own outputs must show the given ids.

In every micro-batch and recompute each output must show all of its ids. In some micro-batches it must show no
other expert either, and the weights are checked. That is one operation a call, whose result stays on the
device. All of a micro-batch's go to the host together when its forward ends, and are read once they have
come: on a CPU at once, from an accelerator a micro-batch or two later, at the latest when the block ends.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import torch

from npu_replay import routers
from npu_replay.errors import NoEffect, RecomputeError, ReplayError, likeliest, micro_batch
from npu_replay.routers import Router
from npu_replay.routes.host_copies import HostCopy
from npu_replay.sessions import seam
from npu_replay.sessions.micro_batches import Forward, Key
from npu_replay.sessions.route_source import Given

Why: TypeAlias = "tuple[str, str]"
"""A problem and its cause, as an error says them."""


class _Check(NamedTuple):
    """Holds what outputs have shown, and how an error describes it.

    Attributes:
        routers: of the outputs.
        number: their micro-batch.
        again: they are of a recompute.
        why: what is wrong if the check fails.
        right: what passed, bool [routers, ...].
    """

    routers: Sequence[Router]
    number: int
    again: bool
    why: Why
    right: torch.Tensor


_CHANGED = (
    "code after the top-k that changes the ids (a forced load balance), or an output that npu_replay misreads"
)
_CHANGED_IN_BLOCK = (
    "code after the top-k that changes the ids (a forced load balance), or another integer tensor "
    "[rows, topk] in the block, from a second choice for one"
)
_PAST_CALL = (
    "a graph that was compiled or captured and runs no hook (torch.compile: pass the compiled module itself, "
    "and compile before the block), another path to the experts than the router's __call__, or a layer that "
    "this forward skipped"
)
_NO_TOPK = (
    "a fused router kernel, a selection without torch.topk (a hash, a kernel; or somebody has replaced "
    "torch.topk inside the block), or a compiled function around the model (torch.compile: pass the compiled "
    "module itself, and compile before the block)"
)
_OTHER_AXES = (
    "a router whose scores keep the axes [batch, sequence, experts]. Flatten them before the top-k, "
    "scores.flatten(0, -2), and give its weights and ids these axes back: ids.unflatten(0, hidden.shape[:-1])"
)
_WRITTEN = "the ids that the top-k gave were written into before the forward ended", _CHANGED
_NOT_SHOWN = "the router's output doesn't show the chosen experts", _CHANGED
_RULED_OUT = (
    "an expert of the routes has a weight that was made from a mask's number",
    likeliest(
        "the router masks experts and then makes the scores of its top-k (by a softmax, or a bias), so an "
        "expert that it masks now has a weight of 0 or so: mask after the softmax, or describe the router "
        "with masks=False where its weights come from other scores than the top-k's",
        "the router masks by another function than masked_fill (where, a product), or in compiled code: call "
        "masked_fill on the scores right before the top-k",
    ),
)
_UNUSED_IN_BLOCK = (
    "nothing takes in the ids of the block's top-k",
    (
        "a kernel that is given them past torch's functions, or a block that doesn't route by this top-k: no "
        "function of torch was given an integer tensor [rows, topk] after it"
    ),
)
_OTHERS_IN_BLOCK = "the block goes on with other experts than its top-k gave", _CHANGED_IN_BLOCK
_TOPKS = (
    (
        "the block takes another number of top-ks of that shape than in the micro-batch that was checked, "
        "so it can't be told which of them routes"
    ),
    _CHANGED_IN_BLOCK,
)
_OTHERS_IN_RECOMPUTE = "the recompute of this router goes on with other experts than its forward", _CHANGED
_OTHERS_IN_KERNEL = (
    "a fused router chose other experts in a recompute than in its forward",
    (
        "a near tie, which fell the other way, and the kernel can't be given experts; with "
        "moe_router_fusion=False a recompute takes the experts of its forward"
    ),
)


class Count:
    """Counts on whatever devices its tensors are. Reading it waits for them."""

    def __init__(self) -> None:
        self._parts: dict[torch.device, torch.Tensor] = {}

    def add(self, counted: torch.Tensor) -> None:
        found = counted.sum()
        before = self._parts.get(found.device)
        self._parts[found.device] = found if before is None else before + found

    def __int__(self) -> int:
        return sum(int(part) for part in self._parts.values())


def is_due(number: int) -> bool:
    """Return whether the whole effect is checked: in micro-batch 0, 1, 2, 4, 8, ...

    In the first the routes may be what the router would choose anyway, where a missing effect doesn't show;
    an optimizer that steps inside the block changes that.

    >>> [number for number in range(20) if is_due(number)]
    [0, 1, 2, 4, 8, 16]
    """
    return number & (number - 1) == 0


class Witness:
    """Compares what the calls of a session's routers show with the ids that they were given."""

    def __init__(self) -> None:
        self.dropped = Count()  # chosen experts that lost the token, over their capacity
        self.chosen = 0  # experts that were chosen in these outputs
        self._asked: list[_Check] = []
        self._late: deque[_Late] = deque()  # of earlier micro-batches, the oldest first
        # By layer, the number of further top-ks of a block in a checked micro-batch. A block that has some is
        # followed in each call: the top-k that was answered may be one for a metric.
        self._topks: dict[int, int] = {}
        self._took: dict[Key, int] = {}  # by call, as its recompute must have the same number
        self._lost: dict[Key, torch.Tensor] = {}  # dropped experts in calls of the running forward
        self._refused: dict[Key, Why] = {}  # of a call that is wrong

    def follows(self, label: int) -> bool:
        """Return whether the use of this block's ids has to be followed in every call."""
        return self._topks.get(label, 0) > 0

    def saw(self, router: Router, forward: Forward, call: seam.Call, output: object) -> None:
        """Check a call of a router that has ended in a forward."""
        number = forward.number
        key = (router.label, forward.number)
        if (ids := call.ids) is None:
            self._refused[key] = _not_reached(router, call)
            return
        forward.ended.append(call)
        if call.ruled_out is not None:
            self._ask(router, number, _RULED_OUT, ~call.ruled_out)
        if router.shows is not None:
            shown = router.shows(output)
            if forward.checked or router.drops:
                self._saw_all(router, forward, call, as_map(shown, router))
            elif shown is not ids:
                self.look(router, number, shown, ids)
            return
        # A block's output shows no ids: the functions that use them do, or else how many top-ks it takes.
        if call.again:
            self._took[key] = call.again
        if forward.checked:
            self._topks[router.label] = call.again
        elif call.again != self._topks.get(router.label, 0):
            self._refused[key] = _TOPKS
            return
        if not call.follows:
            if call.handed is not None and call.handed is not ids:
                self.look(router, number, call.handed, ids)
        elif call.taken is None or not call.taken.count:
            self._refused[key] = _UNUSED_IN_BLOCK
        else:
            self._saw_all(router, forward, call, call.taken.shown())

    def saw_again(self, router: Router, number: int, call: seam.Call, output: object) -> None:
        """Check a recompute of a call that has ended."""
        if call.ids is None:
            return
        if call.strayed is not None:
            self._ask(router, number, _OTHERS_IN_KERNEL, ~call.strayed, again=True)
        elif router.shows is None:
            if call.again != self._took.get((router.label, number), 0):
                raise _error(router, number, *_TOPKS, again=True)
            if call.taken is not None:
                self.look(router, number, call.taken.shown(), call.ids, again=True)
        elif _is_written(call.watched, call.written, call.ids):
            raise _error(router, number, *_OTHERS_IN_RECOMPUTE, again=True)
        else:
            self.look(router, number, router.shows(output), call.ids, again=True)
        if self._asked and self._asked[-1].right.is_cpu:
            self.read(wait=True)

    def saw_stopped(self, router: Router, number: int, call: seam.Call) -> None:
        """Check a block's recompute that its checkpoint stopped early; an error is raised later."""
        # torch hides errors that are raised while a checkpoint stops early.
        if call.again > self._took.get((router.label, number), 0):
            none = torch.zeros((), dtype=torch.bool)
            self._ask(router, number, _OTHERS_IN_RECOMPUTE, none, again=True)
        elif call.taken is not None and call.taken.count and call.ids is not None:
            self.look(router, number, call.taken.shown(), call.ids, again=True)

    def _saw_all(self, router: Router, forward: Forward, call: seam.Call, shown: torch.Tensor) -> None:
        """Check that an output shows each of the ids and no other expert, and check their weights."""
        ids = call.ids
        number = forward.number
        if ids is None or shown.shape != (call.rows, router.num_experts):
            self._refused[router.label, number] = _NOT_SHOWN
            return
        held = shown.gather(1, ids)
        if router.drops:
            right = shown.scatter(1, ids, False).any(dim=1, keepdim=True).logical_not().expand_as(held)
            if forward.checked:
                self._lost[router.label, number] = ~held
        else:
            right = held & (shown.sum(dim=1, keepdim=True) == router.topk)
        if call.values is not None:
            values = call.values.detach()
            if call.given:
                # -inf comes from an unseen mask, unless too few scores are finite. NaN is a diverged step's.
                scarce = (call.scores > float("-inf")).sum(dim=1, keepdim=True) < router.topk
                unseen = held & values.isneginf() & ~scarce
                self._ask(router, number, _RULED_OUT, ~unseen)
        self._ask(router, number, _shows_others(router), right)

    def look(
        self, router: Router, number: int, shown: torch.Tensor, ids: torch.Tensor, *, again: bool = False
    ) -> None:
        """Check that a result of `Router.shows`, bool [rows, experts] or ids [rows, topk], shows the ids."""
        # A router that drops tokens shows fewer experts, but no other.
        if router.drops and shown.shape == (ids.shape[0], router.num_experts):
            right = as_map(shown, router).scatter(1, ids, False).logical_not()
        else:
            right = _shows(shown, ids, router.num_experts)
        why = _OTHERS_IN_RECOMPUTE if again else _shows_others(router)
        self._ask(router, number, why, right, again=again)

    def _ask(self, router: Router, number: int, why: Why, right: torch.Tensor, again: bool = False) -> None:
        self._asked.append(_Check((router,), number, again, why, right[None]))

    def _look_together(self, forward: Forward) -> None:
        """Check what the quick calls of a forward have shown, together if it has one shape."""
        # The tensor that the router was given shows the ids: nobody has written into it.
        calls = [call for call in forward.ended if call.shown is not None and call.shown is not call.handed]
        if not calls:
            return
        routers = [call.owner.router for call in calls]
        shown = [call.shown for call in calls]
        if len({(one.shape, one.dtype, one.device) for one in shown}) > 1:
            for router, call in zip(routers, calls, strict=True):
                self.look(router, forward.number, call.shown, call.ids)
            return
        right = _shows(torch.stack(shown), torch.stack([call.ids for call in calls]), calls[0].num_experts)
        self._asked.append(_Check(routers, forward.number, False, _NOT_SHOWN, right))

    def forget(self, key: Key) -> None:
        """Drop what is known of a call whose forward raised."""
        for kept in (self._lost, self._took, self._refused):
            kept.pop(key, None)
        gone = *key, False
        self._asked = [
            check for check in self._asked if (check.routers[0].label, check.number, check.again) != gone
        ]

    def clear(self) -> None:
        for kept in (self._lost, self._took, self._refused, self._asked, self._late):
            kept.clear()

    def check(self, found: Sequence[Router], forward: Forward, given: Sequence[Given]) -> None:
        """Check after a forward that top-ks were reached and outputs show the ids; NoEffect otherwise.

        Args:
            given: the routes that the routers got, on each device.
        """
        if self._refused or len(forward.ended) != len(found):
            seen = {call.owner.router.label for call in forward.ended}
            for router in found:
                if router.label not in forward.called | seen:
                    raise not_called(router, forward.number)
                if (refused := self._refused.pop((router.label, forward.number), None)) is not None:
                    raise _error(router, forward.number, *refused)
                if router.label not in seen:
                    raise _error(router, forward.number, "the router's output was not seen", _NO_TOPK)
        for call in forward.ended:
            # Compared inline first: the function call costs more than the comparison.
            watched = call.watched
            changed = watched is not None and (call.written is None or watched._version != call.written)
            if changed and _is_written(watched, call.written, call.ids):
                raise _error(call.owner.router, forward.number, *_WRITTEN)
        self._look_together(forward)
        forward.ended.clear()
        for routes in given:
            # The version of a tensor doesn't tell what a kernel writes past torch.
            if (right := routes.untouched()) is not None:
                self._asked.append(_Check(found, forward.number, False, _WRITTEN, right))
        self.read(wait=False)
        for router in found if self._lost else ():
            if (lost := self._lost.pop((router.label, forward.number), None)) is not None:
                self.dropped.add(lost)
                self.chosen += lost.numel()

    def read(self, *, wait: bool) -> None:
        """Check that each output so far shows all of its ids; else raise NoEffect, or RecomputeError.

        Args:
            wait: also for what a device hasn't computed yet; else that is read later.
        """
        if self._asked:
            self._late.append(_Late(self._asked))
            self._asked = []
        while self._late and (wait or self._late[0].has_come()):
            self._late.popleft().check()


class _Late:
    """Holds the checks of one micro-batch, whose common result is on its way to the host."""

    def __init__(self, asked: list[_Check]) -> None:
        self._asked = asked
        right = [check.right for check in asked]
        if len(right) > 1:
            with contextlib.suppress(RuntimeError):  # on several devices, or of several shapes
                right = [torch.cat(right)]
        self._right = HostCopy([one.all() for one in right])

    def has_come(self) -> bool:
        return self._right.has_come()

    def check(self) -> None:
        if all(bool(one) for one in self._right.read()):
            return
        for check in self._asked:
            for router, right in zip(check.routers, check.right, strict=True):
                if not bool(right.all()):
                    raise _error(router, check.number, *check.why, again=check.again)


def _not_reached(router: Router, call: seam.Call) -> Why:
    if call.passed is not None:
        return f"the router's top-k is of scores {list(call.passed)}, and not [rows, experts]", _OTHER_AXES
    return "the router never reached its top-k", routers.explained(router, call.seen) or _NO_TOPK


def _shows_others(router: Router) -> Why:
    return _OTHERS_IN_BLOCK if router.shows is None else _NOT_SHOWN


def _is_written(watched: torch.Tensor | None, written: int | None, ids: torch.Tensor | None) -> bool:
    """Return whether the ids that a router got were written into. A kernel gets none."""
    if watched is None:
        return False
    if written is None:  # inference tensors have no version counter
        return ids is None or not torch.equal(watched, ids)
    return watched._version != written


def _shows(shown: torch.Tensor, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return which ids [..., rows, topk] a result of `Router.shows` holds: bool [..., rows, topk]."""
    if shown.dtype == torch.bool and shown.shape == (*ids.shape[:-1], num_experts):
        return shown.gather(-1, ids)
    if shown.dtype != torch.bool and shown.shape == ids.shape:
        return shown.sort(dim=-1).values == ids.sort(dim=-1).values  # any order is right
    return torch.zeros_like(ids, dtype=torch.bool)


def as_map(shown: torch.Tensor, router: Router) -> torch.Tensor:
    """Return the result of `Router.shows` as bool [rows, experts]; ids that are no expert's show none."""
    if shown.dtype == torch.bool:
        return shown
    experts = router.num_experts
    ids = shown.long().where((shown >= 0) & (shown < experts), experts)
    found = torch.zeros(len(ids), experts + 1, dtype=torch.bool, device=ids.device).scatter(1, ids, True)
    return found[:, :experts]


def not_called(router: Router, number: int) -> ReplayError:
    """Return the error for a router that a forward has left out."""
    return _error(router, number, "the router was not called", router.skipped or _PAST_CALL)


def _error(router: Router, number: int, problem: str, cause: str, *, again: bool = False) -> ReplayError:
    where = micro_batch(number, router.label)
    if again:
        return RecomputeError(problem, where=where, cause=cause)
    where += f" ({router.path or 'the module itself'})"
    expected = f"a top-{router.topk} over {router.num_experts} experts whose result is used"
    return NoEffect(problem, where=where, expected=expected, got="none, or another selection", cause=cause)
