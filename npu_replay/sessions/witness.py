"""The effect is checked, not the interception: what the routers' own outputs show of the ids they were given.

What is found stays on the device, and is read once, at the end of a forward.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

import torch

from npu_replay import routers
from npu_replay.errors import NoEffect, micro_batch
from npu_replay.routers import Router
from npu_replay.sessions import seam

Key: TypeAlias = "tuple[int, int]"  # layer label, micro-batch


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


class Witness:
    """What the calls of a session's routers have shown.

    Attributes:
        dropped: chosen experts that an output didn't show, over their capacity.
        chosen: how many experts were chosen in these outputs.
        strayed: calls of a fused router whose recompute chose others than its forward.
    """

    def __init__(self) -> None:
        self.dropped = Count()
        self.chosen = 0
        self.strayed = Count()
        self._flags: dict[Key, torch.Tensor] = {}
        self._unreached: dict[Key, list[str]] = {}  # and what was called instead

    def saw(self, router: Router, number: int, call: seam.Call, output: object) -> None:
        """A call of the router in a forward has ended."""
        key = router.label, number
        if call.ids is None:
            self._unreached[key] = call.seen
        elif call.suspect is not None:
            with torch.no_grad():
                self._flags[key] = self._flag(router, call, call.ids, call.suspect, router.shows(output))

    def saw_again(self, call: seam.Call) -> None:
        """A call of a router in a recompute has ended."""
        if call.way == "fused" and call.suspect is not None:
            self.strayed.add(call.suspect)

    def _flag(
        self, router: Router, call: seam.Call, ids: torch.Tensor, suspect: torch.Tensor, shown: torch.Tensor
    ) -> torch.Tensor:
        """Does the output show other experts than the router was given?"""
        if shown.shape != (call.rows, router.num_experts):
            return torch.ones_like(suspect)
        given = torch.zeros_like(shown).scatter(1, ids, True)
        if not router.drops:
            return (shown != given).any() | suspect
        self.dropped.add(given & ~shown)
        self.chosen += ids.numel()
        return (shown & ~given).any() | suspect

    def forget(self, key: Key) -> None:
        """The forward of this call raised."""
        self._flags.pop(key, None)
        self._unreached.pop(key, None)

    def clear(self) -> None:
        """The block is over."""
        self._flags.clear()
        self._unreached.clear()

    def check(self, found: Sequence[Router], called: Collection[int], number: int) -> None:
        """After every forward: was each top-k reached? After some: do the outputs show the ids?

        Raises:
            NoEffect: a router was not called, never reached its top-k, or shows other experts.
        """
        for router in found:
            key = router.label, number
            if router.label not in called:
                raise _no_effect(router, number, "the router was not called", _PAST_CALL)
            if key in self._unreached:
                known = routers.explained(router, self._unreached[key]) or _NO_TOPK
                raise _no_effect(router, number, "the router never reached its top-k", known)
        wrong = self._wrong([(router.label, number) for router in found])
        for router in found:
            if (router.label, number) in wrong:
                problem = "the router's output doesn't show the chosen experts"
                raise _no_effect(router, number, problem, _CHANGED)

    def _wrong(self, keys: Sequence[Key]) -> set[Key]:
        """The calls whose flags are set. Waits for each device once."""
        by_device: dict[torch.device, list[tuple[Key, torch.Tensor]]] = {}
        for key in keys:
            if (flag := self._flags.pop(key, None)) is not None:
                by_device.setdefault(flag.device, []).append((key, flag))
        return {
            key
            for flagged in by_device.values()
            for (key, _), is_set in zip(
                flagged, torch.stack([flag for _, flag in flagged]).tolist(), strict=True
            )
            if is_set
        }


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
_CHANGED = (
    "code after the top-k that changes the ids (a forced load balance), or an output that npu_replay misreads"
)
