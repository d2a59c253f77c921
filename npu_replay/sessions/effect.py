"""Check the effect of a replay, not the interception: the routers' own outputs must show the given ids.

In every micro-batch and recompute each output must show all of its ids. In some micro-batches it must show no
other expert either, and the weights are checked. That is one operation a call, whose result stays on the
device. All of a micro-batch's go to the host together when its forward ends, and are read once they have
come: on a CPU at once, from an accelerator a micro-batch or two later, at the latest when the block ends.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from npu_replay.errors import NoEffect, RecomputeError, ReplayError, likeliest, micro_batch
from npu_replay.routers import Router, as_map
from npu_replay.routes.host_copies import HostCopy
from npu_replay.seam.call import Call

if TYPE_CHECKING:
    from npu_replay.sessions.micro_batch import MicroBatch

Why: TypeAlias = "tuple[str, str]"
"""A problem and its cause, as an error says them."""


class Check(NamedTuple):
    """Holds what outputs have shown, and how an error describes it.

    Attributes:
        routers: of the outputs.
        number: their micro-batch.
        again: they are of a recompute.
        why: what is wrong if the check fails.
        right: what passed, bool [routers, ...]; None where it is known that nothing did.
    """

    routers: Sequence[Router]
    number: int
    again: bool
    why: Why
    right: torch.Tensor | None


_CHANGED = (
    "code after the top-k that changes the ids (a forced load balance), or an output that npu_replay misreads"
)
_CHANGED_IN_BLOCK = (
    "code after the top-k that changes the ids (a forced load balance), or another integer tensor "
    "[rows, topk] in the block, from a second choice for one"
)
_PAST_CALL = (
    "a graph that was compiled or captured and runs no hook (torch.compile: pass the compiled module itself, "
    "and compile before the block), a kernel that routes without the router (load a model of transformers "
    "without use_kernels=True, and MXFP4 weights with quantization_config=Mxfp4Config(dequantize=True)), "
    "another path to the experts than the router's __call__, a layer that this forward skipped, or one that "
    "was replaced inside the block"
)
_NO_TOPK = likeliest(
    "a fused router kernel, which chooses without a top-k (npu_moe_gating_top_k, say): turn the fused "
    "router off (Megatron: moe_router_fusion=False)",
    "scores that keep the axes [batch, sequence, experts]: flatten them before the top-k, "
    "scores.flatten(0, -2), and give weights and ids these axes back, ids.unflatten(0, hidden.shape[:-1])",
    "another selection without torch.topk (a hash, a sort); an action that Megatron's RouterReplay was given "
    "inside the block; or somebody has replaced torch.topk inside the block",
    "a compiled function around the model (torch.compile: pass the compiled module itself, and compile "
    "before the block)",
)
_WRITTEN = "the ids that the top-k gave were written into before the forward ended", _CHANGED
_NOT_SHOWN = "the router's output doesn't show the chosen experts", _CHANGED
_RULED_OUT = (
    "an expert of the routes has a weight that was made from a mask's number",
    likeliest(
        "the router masks experts and then makes the scores of its top-k (by a softmax, say), so an "
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


class Checks:
    """Reads checks whose results are on their way to the host, those of a micro-batch together."""

    def __init__(self) -> None:
        self._asked: list[Check] = []
        self._late: deque[_Late] = deque()  # the oldest first

    def add(self, checks: Iterable[Check]) -> None:
        self._asked.extend(checks)

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

    def clear(self) -> None:
        self._asked.clear()
        self._late.clear()


class _Late:
    """Holds checks whose common result is on its way to the host."""

    def __init__(self, asked: list[Check]) -> None:
        self._asked = asked
        right = [check.right for check in asked if check.right is not None]
        self._known = len(right) == len(asked)
        if len(right) > 1:
            with contextlib.suppress(RuntimeError):  # on several devices, or of several shapes
                right = [torch.cat(right)]
        self._right = HostCopy([part.all() for part in right])

    def has_come(self) -> bool:
        return self._right.has_come()

    def check(self) -> None:
        if self._known and all(bool(part) for part in self._right.read()):
            return
        for check in self._asked:
            for at, router in enumerate(check.routers):
                if check.right is None or not bool(check.right[at].all()):
                    raise _error(router, check.number, *check.why, again=check.again)


def of_forward(call: Call, output: object) -> Iterator[Check]:
    """Yield the checks of a call of a forward, by the output of the router."""
    router = call.owner.router
    checked = call.micro_batch.checked
    if (ids := call.ids) is None:
        yield _check(call, ("the router never reached its top-k", router.bypass or _NO_TOPK))
        return
    if call.ruled_out is not None:
        yield _check(call, _RULED_OUT, ~call.ruled_out)
    if router.shows is None:
        yield from _of_block(call, ids)
        return
    shown = router.shows(output)
    if checked or router.drops:
        yield from _of_all(call, ids, as_map(shown, router.num_experts))
    elif shown is not ids:
        yield looked_at(call, shown, ids)


def _of_block(call: Call, ids: torch.Tensor) -> Iterator[Check]:
    """Check a block, whose output shows no ids: the functions that use them do, or else its top-ks."""
    if call.further != call.owner.further:
        yield _check(call, _TOPKS)
        return
    if not call.follows:
        if call.handed is not None and call.handed is not ids:
            yield looked_at(call, call.handed, ids)
    elif call.taken is None or not call.taken.count:
        yield _check(call, _UNUSED_IN_BLOCK)
    else:
        yield from _of_all(call, ids, call.taken.shown())


def _of_all(call: Call, ids: torch.Tensor, shown: torch.Tensor) -> Iterator[Check]:
    """Check that an output shows each of the ids and no other expert, and check their weights."""
    router = call.owner.router
    if shown.shape != (call.rows, router.num_experts):
        yield _check(call, _NOT_SHOWN)
        return
    present = shown.gather(1, ids)
    if router.drops:
        right = shown.scatter(1, ids, False).any(dim=1, keepdim=True).logical_not().expand_as(present)
        if call.micro_batch.checked:
            call.micro_batch.unshown.append(~present)
    else:
        right = present & (shown.sum(dim=1, keepdim=True) == router.topk)
    yield _check(call, _shows_others(router), right)


def of_recompute(call: Call, output: object) -> Iterator[Check]:
    """Yield the checks of a recompute, by the output of the router; RecomputeError for what is known."""
    router = call.owner.router
    if (ids := call.ids) is None:
        return
    if call.strayed is not None:
        yield _check(call, _OTHERS_IN_KERNEL, ~call.strayed)
    elif _is_written(call):
        raise _error(router, call.micro_batch.number, *_OTHERS_IN_RECOMPUTE, again=True)
    elif router.shows is not None:  # a block does with the ids what its forward did
        yield looked_at(call, router.shows(output), ids)


def looked_at(call: Call, shown: torch.Tensor, ids: torch.Tensor) -> Check:
    """Check that a result of `Router.shows`, bool [rows, experts] or ids [rows, topk], shows the ids."""
    router = call.owner.router
    # A router that drops tokens shows fewer experts, but no other.
    if router.drops and shown.shape == (ids.shape[0], router.num_experts):
        right = as_map(shown, router.num_experts).scatter(1, ids, False).logical_not()
    else:
        right = _shows(shown, ids, router.num_experts)
    return _check(call, _OTHERS_IN_RECOMPUTE if call.is_recompute else _shows_others(router), right)


def of_quick_calls(calls: Sequence[Call], ids: torch.Tensor | None) -> list[Check]:
    """Check what quick calls of one forward have shown, together if their ids, [calls, rows, topk], are."""
    if ids is not None:
        with contextlib.suppress(RuntimeError):  # they have shown tensors of several shapes
            right = _shows(torch.stack([call.shown for call in calls]), ids, calls[0].plan.num_experts)
            routers = [call.owner.router for call in calls]
            return [Check(routers, calls[0].micro_batch.number, False, _NOT_SHOWN, right)]
    return [looked_at(call, call.shown, call.ids) for call in calls]


def of_given(routers: Sequence[Router], ended: MicroBatch, untouched: torch.Tensor) -> Check:
    """Check that the ids of a forward that somebody has written into are the given ones."""
    return Check(routers, ended.number, False, _WRITTEN, untouched)


def _check(call: Call, why: Why, right: torch.Tensor | None = None) -> Check:
    """Check one call; without `right` it is known to be wrong."""
    right = None if right is None else right[None]
    return Check((call.owner.router,), call.micro_batch.number, call.is_recompute, why, right)


def refuse_wrong_calls(ended: MicroBatch, routers: Sequence[Router]) -> None:
    """Refuse a forward that left a router out, or a call of which the host knows that it is wrong."""
    calls = ended.calls
    wrong = {check.routers[0].label: check for check in ended.checks if check.right is None}
    for router in routers if wrong or len(calls) < len(routers) else ():
        if router.label not in calls:
            raise not_called(router, ended.number)
        if router.label in wrong:
            raise _error(router, ended.number, *wrong[router.label].why)
    for call in calls.values():
        if not call.has_ended:
            raise _error(call.owner.router, ended.number, "the router's output was not seen", _NO_TOPK)
        # Compared inline first: the function call costs more than the comparison.
        watched = call.watched
        changed = watched is not None and (call.written is None or watched._version != call.written)
        if changed and _is_written(call):
            raise _error(call.owner.router, ended.number, *_WRITTEN)


def _shows_others(router: Router) -> Why:
    return _OTHERS_IN_BLOCK if router.shows is None else _NOT_SHOWN


def _is_written(call: Call) -> bool:
    """Return whether the ids that a router got were written into. A kernel gets none."""
    if call.watched is None:
        return False
    if call.written is None:  # inference tensors have no version counter
        return call.ids is None or not torch.equal(call.watched, call.ids)
    return call.watched._version != call.written


def _shows(shown: torch.Tensor, ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return which ids [..., rows, topk] a result of `Router.shows` holds: bool [..., rows, topk]."""
    if shown.dtype == torch.bool and shown.shape == (*ids.shape[:-1], num_experts):
        return shown.gather(-1, ids)
    if shown.dtype != torch.bool and shown.shape == ids.shape:
        return shown.sort(dim=-1).values == ids.sort(dim=-1).values  # any order is right
    return torch.zeros_like(ids, dtype=torch.bool)


def not_called(router: Router, number: int) -> ReplayError:
    """Return the error for a router that a forward has left out."""
    return _error(router, number, "the router was not called", _PAST_CALL)


def _error(router: Router, number: int, problem: str, cause: str, *, again: bool = False) -> ReplayError:
    where = micro_batch(number, router.label)
    if again:
        return RecomputeError(problem, where=where, cause=cause)
    where += f" ({router.path or 'the module itself'})"
    return NoEffect(
        problem,
        where=where,
        expected=f"a top-{router.topk} over {router.num_experts} experts whose result is used",
        got="none, or another selection",
        cause=cause,
    )
