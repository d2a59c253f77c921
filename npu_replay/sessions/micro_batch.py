"""Hold one forward of a model chunk, and what is known of it until its last recompute.

A forward that raises leaves an object without calls, so nothing has to be cleaned after it elsewhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from npu_replay.errors import micro_batch
from npu_replay.seam.call import Call

Key: TypeAlias = "tuple[int, int]"
"""The chunk and number of a micro-batch."""


class MicroBatch:
    """Represents one forward of a chunk.

    Args:
        chunks: of the block.
        grad: whether it began with grad.
        made: autograd's sequence number when it began.
        enclosing: objects around it that may run it again.
        handling: the exception that was being handled when it began.

    Attributes:
        is_open: it runs.
        has_raised: its routers' recomputes belong to no forward, and its number is the next one's.
        checked: the whole effect is checked, not only that outputs show the ids.
        is_judged: the overlap of given ids with the routers' own choice is judged.
        compares: given ids are compared with it, for that or for another reason.
        rows: of the given routes; -1: not known.
        calls: the call of each router that has begun, by layer label, until the forward has ended.
        checks: what its outputs have shown.
        differing: of compared calls, the rows where the own choice differs, bool, and how many were compared.
        own_choices: of judged calls, the routes and the own choice, by layer label (`OwnChoice`).
        unshown: of checked outputs that may drop tokens, the ids that they lack, bool [rows, topk].
        lost: of the kept ids, those whose token was dropped, bool [rows, topk], where any can be.
        around: of the calls that may be run again, what encloses each; held weakly.
        ran: layer labels of those that were run again.
    """

    def __init__(
        self,
        chunk: int,
        number: int,
        chunks: int,
        grad: bool,
        made: int,
        enclosing: Sequence[Any] = (),
        handling: BaseException | None = None,
    ) -> None:
        self.chunk = chunk
        self.number = number
        self._chunks = chunks
        self.grad = grad
        self.made = made
        self.enclosing = enclosing
        self.handling = handling
        self.is_open = True
        self.has_raised = False
        self.checked = False
        self.is_judged = False
        self.compares = False
        self.rows = -1
        self.calls: dict[int, Call] = {}
        self.checks: list[Any] = []  # effect.Check
        self.unshown: list[torch.Tensor] = []
        self.differing: list[tuple[torch.Tensor, int]] = []
        self.own_choices: dict[int, Any] = {}
        self._ids: dict[int, torch.Tensor] = {}
        self._stacked: tuple[list[int], torch.Tensor] | None = (
            None  # labels, and ids that aren't in `_ids` yet
        )
        self.lost: dict[int, torch.Tensor] = {}
        self.around: dict[int, list[weakref.ref[Any]]] = {}
        self.ran: set[int] = set()

    @property
    def key(self) -> Key:
        return self.chunk, self.number

    @property
    def ids(self) -> dict[int, torch.Tensor]:
        """Return the ids that its routers used, narrow [rows, topk], by layer label: those that are kept."""
        if self._stacked is not None:
            labels, ids = self._stacked
            self._stacked = None
            self._ids.update(zip(labels, ids.unbind(), strict=True))
        return self._ids

    @property
    def place(self) -> str:
        """Return the place of an error."""
        return place_of(self.number, self.chunk, self._chunks)

    def keep(self, call: Call) -> bool:
        """Keep what a record or a recompute needs of a call; return whether its ids are still to be kept."""
        label = call.owner.label
        if call.around:
            self.around[label] = [weakref.ref(enclosing) for enclosing in call.around]
        if call.lost is not None:
            self.lost[label] = call.lost
        on_device = call.routes
        if on_device is not None and on_device.missing is None:
            self._ids[label] = on_device.narrow[:, on_device.routes.columns[label]]
            return False
        return call.ids is not None

    def keep_ids(self, calls: Sequence[Call], stacked: torch.Tensor | None) -> None:
        """Keep the ids of calls in a narrow dtype; `stacked` are theirs, [calls, rows, topk], if they fit."""
        if stacked is None:
            self._ids.update((call.owner.label, call.ids.to(call.owner.narrow)) for call in calls)
        else:
            # pin_recompute takes layers with other numbers of experts together.
            widest = max((call.owner.narrow for call in calls), key=lambda dtype: dtype.itemsize)
            self._stacked = [call.owner.label for call in calls], stacked.to(widest)

    def ids_of(self, label: int) -> torch.Tensor | None:
        """Return the ids that a router used, [rows, topk]; None where they weren't kept."""
        call = self.calls.get(label)
        return self.ids.get(label) if call is None else call.ids

    def forget_calls(self) -> None:
        """Drop what is known of its calls until it ends."""
        for container in (self.calls, self.checks, self.unshown, self.differing, self.own_choices):
            container.clear()

    def let_go(self) -> None:
        """Drop the ids: no recompute comes any more."""
        self._ids.clear()
        self._stacked = None
        self.lost.clear()
        self.around.clear()

    def may_run_again(self) -> Iterator[int]:
        """Yield the labels of calls that autograd may run again, be it a second time."""
        for label, around in self.around.items():
            if any(reference() is not None for reference in around):
                yield label


def is_due(number: int) -> bool:
    """Return whether the whole effect is checked: in micro-batch 0, 1, 2, 4, 8, ...

    In the first the routes may be what the router would choose anyway, where a missing effect doesn't show;
    an optimizer that steps inside the block changes that.

    >>> [number for number in range(20) if is_due(number)]
    [0, 1, 2, 4, 8, 16]
    """
    return number & (number - 1) == 0


def place_of(number: int, chunk: int, chunks: int) -> str:
    """Return the place of an error: a micro-batch, and its chunk if the block has several."""
    where = micro_batch(number)
    return f"{where}, chunk {chunk}" if chunks > 1 else where


def of_all_chunks(
    kept: Mapping[Key, MicroBatch], chunks: int, number: int
) -> tuple[dict[int, torch.Tensor], dict[int, torch.Tensor]]:
    """Return `ids` and `lost` of all chunks of one micro-batch; a chunk without a router has none."""
    ids: dict[int, torch.Tensor] = {}
    lost: dict[int, torch.Tensor] = {}
    for chunk in range(chunks):
        if (part := kept.get((chunk, number))) is not None:
            ids |= part.ids
            lost |= part.lost
    return ids, lost
