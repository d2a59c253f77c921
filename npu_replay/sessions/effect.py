"""The effect is checked, not the interception: what the routers' own outputs show of the ids they were given.

What is found stays on the device, and is read once, at the end of a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from npu_replay import routers
from npu_replay.errors import NoEffect, micro_batch
from npu_replay.routers import Router
from npu_replay.sessions import seam
from npu_replay.sessions.micro_batches import Forward
from npu_replay.sessions.recompute import Key


class Count:
    """A whole number that grows on whatever devices it is counted on. Reading it waits for them."""

    def __init__(self) -> None:
        self._parts: dict[torch.device, torch.Tensor] = {}

    def add(self, counted: torch.Tensor) -> None:
        """Add what a tensor holds, a number or a flag each."""
        found = counted.sum()
        before = self._parts.get(found.device)
        self._parts[found.device] = found if before is None else before + found

    def __int__(self) -> int:
        return sum(int(part) for part in self._parts.values())


def is_due(number: int) -> bool:
    """Is the effect checked in micro-batch 0, 1, 2, 4, 8, ...?

    In the first the routes may be what the router would have chosen anyway, so that having no effect shows
    nothing; an optimizer that steps inside the block changes that.

    >>> [number for number in range(20) if is_due(number)]
    [0, 1, 2, 4, 8, 16]
    """
    return number & (number - 1) == 0


class _Shown(NamedTuple):
    """What one output showed.

    Attributes:
        map: bool [rows, experts], which experts are shown.
        ids: int64 [rows, topk], those that the router was given.
        values: float [rows, topk], the scores of these, unmasked; None for a fused kernel.
    """

    map: torch.Tensor
    ids: torch.Tensor
    values: torch.Tensor | None


_OTHER_ROWS = (0, 0, -1)
_UNTAKEN = (0, 0, -2)
_NOBODY = (-1, -1)
_HELD = 2**22
"""Bytes of maps that are held until they are counted together."""


class Witness:
    """What the calls of a session's routers have shown.

    Attributes:
        dropped: chosen experts that an output didn't show, over their capacity.
        chosen: how many experts were chosen in these outputs.
        strayed: calls of a fused router whose recompute chose others than its forward.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self.chosen = 0
        self.strayed = Count()
        self._shown: dict[Key, _Shown] = {}
        self._held = 0
        self._counted: list[tuple[list[Key], int, torch.Tensor, torch.Tensor]] = []
        """Calls, how many experts each chose, and int64 [calls], how many of these are shown and how many are
        in all."""
        self._counts: dict[Key, tuple[int, int, int]] = {}
        """The same, read."""
        self._unreached: dict[Key, list[str]] = {}  # and what was called instead

    def saw(self, router: Router, forward: Forward, call: seam.Call, output: object) -> None:
        """A call of the router in a forward has ended."""
        key = router.label, forward.number
        if call.ids is None:
            self._unreached[key] = call.seen
        elif forward.checked:
            if router.shows is not None:
                shown = router.shows(output)
            elif call.taken is not None and call.taken.count:
                shown = call.taken.shown()
            else:
                self._counts[key] = _UNTAKEN
                return
            if shown.shape != (call.rows, router.num_experts):
                self._counts[key] = _OTHER_ROWS
                return
            values = None if call.values is None else call.values.detach()
            if call.masks and values is not None and (scores := call.unmasked(call.scores)) is call.scores:
                shown = shown | _zeroed(values, scores.detach())  # all of them, which is wrong
            self._shown[key] = _Shown(shown, call.ids, values)
            self._held += shown.numel()
            if self._held > _HELD:
                self._count()

    def forget(self, key: Key) -> None:
        """The forward of this call raised."""
        for kept in (self._shown, self._counts, self._unreached):
            kept.pop(key, None)
        for keys, *_ in self._counted:
            keys[:] = [_NOBODY if one == key else one for one in keys]

    def clear(self) -> None:
        """The block is over."""
        for kept in (self._shown, self._counted, self._counts, self._unreached):
            kept.clear()

    def check(self, found: Sequence[Router], forward: Forward) -> None:
        """After every forward: was each top-k reached? After some: do the outputs show the ids?

        Raises:
            NoEffect: a router was not called, never reached its top-k, or shows other experts.
        """
        number = forward.number
        if forward.checked:
            self._count()
            self._read()
        for router in found:
            key = router.label, number
            if router.label not in forward.called:
                raise not_called(router, number)
            if (seen := self._unreached.get(key)) is not None:
                known = routers.explained(router, seen) or _NO_TOPK
                raise _no_effect(router, number, "the router never reached its top-k", known)
            if not forward.checked:
                continue
            if (counted := self._counts.pop(key, None)) is None:
                raise _no_effect(router, number, "the router's output was not seen", _NO_TOPK)
            chosen, inside, total = counted
            if counted == _UNTAKEN:
                raise _no_effect(router, number, "nothing takes in the ids of the block's top-k", _PAST_TORCH)
            if inside != total or not (router.drops or total == chosen):
                problem, cause = "the router's output doesn't show the chosen experts", CHANGED
                if router.shows is None:
                    problem, cause = (
                        "the block goes on with other experts than its top-k gave",
                        _CHANGED_IN_BLOCK,
                    )
                raise _no_effect(router, number, problem, cause)
            if router.drops:
                self.dropped += chosen - inside
                self.chosen += chosen

    def _count(self) -> None:
        """Count what outputs have shown. Those of one size go together: each operation has its price."""
        alike: dict[object, list[Key]] = {}
        for key, one in self._shown.items():
            scored = None if one.values is None else one.values.dtype
            alike.setdefault((one.map.device, one.map.shape, one.ids.shape, scored), []).append(key)
        for keys in alike.values():
            maps, ids, values = zip(*(self._shown[key] for key in keys), strict=True)
            shown = torch.stack(maps)
            inside = shown.gather(2, torch.stack(ids))
            if values[0] is not None:  # -inf is a mask's that nobody saw, and NaN a step's that diverged
                inside = inside > torch.stack(values).isneginf()
            self._counted.append((keys, ids[0].numel(), inside.sum(dim=(1, 2)), shown.sum(dim=(1, 2))))
        self._shown.clear()
        self._held = 0

    def _read(self) -> None:
        """Read what was counted. Waits for each device once."""
        for device in {inside.device for *_, inside, _ in self._counted}:
            here = [one for one in self._counted if one[2].device == device]
            figures = torch.cat([part for *_, inside, total in here for part in (inside, total)]).tolist()
            for keys, chosen, *_ in here:
                count = len(keys)
                for key, inside, total in zip(keys, figures, figures[count:], strict=False):
                    self._counts[key] = chosen, inside, total
                del figures[: 2 * count]
        self._counted.clear()


def _zeroed(values: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A flag on the device: were these gathered from scores that somebody masked unseen, by a product with 0?

    It shows as exact zeros in rows whose best score is above zero.
    """
    return ((values == 0).any(dim=1) & (scores.amax(dim=1) > 0) & (scores == 0).any(dim=1)).any()


def not_called(router: Router, number: int) -> NoEffect:
    """The error of a router that a forward left out."""
    return _no_effect(router, number, "the router was not called", _PAST_CALL)


def _no_effect(router: Router, number: int, problem: str, cause: str) -> NoEffect:
    return NoEffect(
        problem,
        where=f"{micro_batch(number, router.label)} ({router.path or 'the module itself'})",
        expected=f"a top-{router.topk} over {router.num_experts} experts whose result is used",
        got="none, or another selection",
        cause=cause,
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
_PAST_TORCH = (
    "a kernel that is given them past torch's functions, or a block that doesn't route by this top-k: no "
    "function of torch was given an integer tensor [rows, topk] after it"
)
_CHANGED_IN_BLOCK = (
    "code after the top-k that changes the ids (a forced load balance), or another integer tensor "
    "[rows, topk] in the block, from a second choice for one"
)
CHANGED = (
    "code after the top-k that changes the ids (a forced load balance), or an output that npu_replay misreads"
)
