"""The effect is checked, not the interception: what the routers' own outputs show of the ids they were given.

In every micro-batch, and in every recompute, each output has to show each of the ids (`shown_ids.py`). In
some micro-batches it must show no other expert either, and the weights are looked at. What is found stays on
the device, and is read once, at the end of a forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from npu_replay import routers
from npu_replay.errors import NoEffect, RecomputeError, micro_batch
from npu_replay.routers import Router
from npu_replay.sessions import seam
from npu_replay.sessions.micro_batches import Forward
from npu_replay.sessions.recompute import Key
from npu_replay.sessions.shown_ids import Asked, ShownIds


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
    """Is the whole effect checked in micro-batch 0, 1, 2, 4, 8, ...?

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
        self._ids = ShownIds()
        self._topks: dict[int, int] = {}
        """How many further top-ks each block took in a micro-batch that was checked, by layer."""
        self._shown: dict[Key, _Shown] = {}
        self._bytes = 0
        self._counted: list[tuple[list[Key], int, torch.Tensor, torch.Tensor]] = []
        """Calls, how many experts each chose, and int64 [calls], how many of these are shown and how many are
        in all."""
        self._counts: dict[Key, tuple[int, int, int]] = {}
        """The same, read."""
        self._refused: dict[Key, tuple[str, str]] = {}
        """Problem and cause of a call that is known to be wrong."""

    def saw(self, router: Router, forward: Forward, call: seam.Call, output: object) -> None:
        """A call of the router in a forward has ended."""
        if (ids := call.ids) is None:
            cause = routers.explained(router, call.seen) or _NO_TOPK
            self._refused[router.label, forward.number] = "the router never reached its top-k", cause
            return
        forward.ended.append((router, ids, call.handed, call.written))
        if router.shows is None:
            self._saw_block(router, forward, call)
        elif forward.checked or router.drops:
            key = router.label, forward.number
            self._saw_all(key, router, call, as_map(router.shows(output), router))
        elif (shown := router.shows(output)) is not ids:
            self._ids.look(router, forward.number, shown, ids)

    def saw_again(self, router: Router, number: int, call: seam.Call, output: object) -> None:
        """A recompute of a call has ended."""
        if router.shows is None or call.ids is None:
            return
        asked = Asked(router, number, True)
        if seam.is_written(call.handed, call.written, call.ids):
            raise _strayed(asked)
        self._ids.look(router, number, router.shows(output), call.ids, again=True)
        self.check_ids(on_accelerators=False)

    def _saw_block(self, router: Router, forward: Forward, call: seam.Call) -> None:
        """A block's output shows nothing: what takes its ids in does, or at least how many top-ks it took."""
        key = router.label, forward.number
        if not forward.checked:
            if call.again != self._topks.get(router.label, 0):
                self._refused[key] = _TOPKS, _CHANGED_IN_BLOCK
            elif call.handed is not None and call.ids is not None and call.handed is not call.ids:
                self._ids.look(router, forward.number, call.handed, call.ids)
            return
        self._topks[router.label] = call.again
        if call.taken is None or not call.taken.count:
            self._refused[key] = "nothing takes in the ids of the block's top-k", _PAST_TORCH
        else:
            self._saw_all(key, router, call, call.taken.shown())

    def _saw_all(self, key: Key, router: Router, call: seam.Call, shown: torch.Tensor) -> None:
        if call.ids is None or shown.shape != (call.rows, router.num_experts):
            self._refused[key] = _NOT_SHOWN, CHANGED
            return
        values = None if call.values is None else call.values.detach()
        if values is not None and call.made is not None and not call.made.sees(call.scores):
            shown = shown | _zeroed(values, call.scores.detach())  # all of them, which is wrong
        # A copy: what comes after the router may write into its output.
        self._shown[key] = _Shown(shown.clone(), call.ids, values)
        self._bytes += shown.numel()
        if self._bytes > _HELD:
            self._count()

    def forget(self, key: Key) -> None:
        """The forward of this call raised."""
        for kept in (self._shown, self._counts, self._refused):
            kept.pop(key, None)
        self._ids.forget(*key)
        for keys, *_ in self._counted:
            keys[:] = [_NOBODY if one == key else one for one in keys]

    def clear(self) -> None:
        """The block is over."""
        for kept in (self._shown, self._counted, self._counts, self._refused, self._ids):
            kept.clear()

    def check(self, found: Sequence[Router], forward: Forward) -> None:
        """After every forward: was each top-k reached, and do the outputs show the ids?

        Raises:
            NoEffect: a router was not called, never reached its top-k, or shows other experts.
        """
        if self._refused or len(forward.ended) != len(found):
            self._check_called(found, forward)
        for router, ids, handed, written in forward.ended:
            # Asked here first, as the call of is_written costs more than what it asks of most tensors.
            if (written is None or handed._version != written) and seam.is_written(handed, written, ids):
                raise _no_effect(router, forward.number, _WRITTEN, CHANGED)
        forward.ended.clear()
        self.check_ids(on_accelerators=forward.checked)
        if self._shown or self._counted:
            self._count()
            self._read()
            for router in found:
                if (counted := self._counts.pop((router.label, forward.number), None)) is not None:
                    self._check_counts(router, forward, *counted)

    def _check_called(self, found: Sequence[Router], forward: Forward) -> None:
        seen = {router.label for router, *_ in forward.ended}
        for router in found:
            if router.label not in forward.called:
                raise not_called(router, forward.number)
            if (refused := self._refused.pop((router.label, forward.number), None)) is not None:
                raise _no_effect(router, forward.number, *refused)
            if router.label not in seen:
                raise _no_effect(router, forward.number, "the router's output was not seen", _NO_TOPK)

    def check_ids(self, *, on_accelerators: bool = True) -> None:
        """Does each output until now show all of its ids? Waits for the devices that are read.

        Raises:
            NoEffect: one doesn't.
            RecomputeError: that of a recompute doesn't.
        """
        wrong = self._ids.first_wrong(on_accelerators=on_accelerators)
        if wrong is not None:
            raise _strayed(wrong) if wrong.again else _no_effect(*wrong[:2], _NOT_SHOWN, CHANGED)

    def _check_counts(self, router: Router, forward: Forward, chosen: int, inside: int, total: int) -> None:
        if inside != total or not (router.drops or total == chosen):
            if router.shows is None:
                raise _no_effect(router, forward.number, _OTHERS_IN_BLOCK, _CHANGED_IN_BLOCK)
            raise _no_effect(router, forward.number, _NOT_SHOWN, CHANGED)
        if router.drops and forward.checked:
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
        self._bytes = 0

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


def as_map(shown: torch.Tensor, router: Router) -> torch.Tensor:
    """What `Router.shows` gave, as bool [rows, experts]; ids that are no expert's show none."""
    if shown.dtype == torch.bool:
        return shown
    experts = router.num_experts
    ids = shown.long().where((shown >= 0) & (shown < experts), experts)
    return torch.zeros(len(ids), experts + 1, dtype=torch.bool, device=ids.device).scatter(1, ids, True)[
        :, :experts
    ]


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


def _strayed(asked: Asked) -> RecomputeError:
    return RecomputeError(
        "the recompute of this router goes on with other experts than its forward",
        where=micro_batch(asked.number, asked.router.label),
        expected="those of the forward in the output of the recompute, too",
        got="others",
        cause=CHANGED,
    )


_WRITTEN = "the ids that the top-k gave were written into before the forward ended"
_NOT_SHOWN = "the router's output doesn't show the chosen experts"
_OTHERS_IN_BLOCK = "the block goes on with other experts than its top-k gave"
_TOPKS = (
    "the block takes another number of top-ks of that shape than in the micro-batch that was checked, so it "
    "can't be told which of them routes"
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
