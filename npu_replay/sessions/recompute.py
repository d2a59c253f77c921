"""Whose forward a recompute runs again, and which recomputes may yet come.

Whatever encloses a forward of the model, or a router's call in it, and may run it again
(`backward.enclosing`) is noted with it: a checkpoint around the loss, one around several layers and one
around each of them may all enclose the same call. A recompute is led back by the innermost of them that runs
it.

Where nothing that was noted runs, as in a tensor's hook, the number of autograd's running node tells: the
counter is noted at the end of each forward, and the number falls between two notes. Ends and not starts are
noted: a reentrant checkpoint around the whole model makes its node before the model's forward begins.
"""

from __future__ import annotations

import bisect
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch

from npu_replay.errors import RecomputeError
from npu_replay.sessions import backward

Owner: TypeAlias = "tuple[int, int]"  # chunk, micro-batch
Key: TypeAlias = "tuple[int, int]"  # layer label, micro-batch


class Owners:
    """Which forward of the model each recompute belongs to.

    Attributes:
        since: the number of the first node that can be a forward's of this block.
        ends: the number after each forward's last node, and whose they are: None after one that raised.
    """

    def __init__(self) -> None:
        self.since = backward.sequence_number()
        self.ends: list[tuple[int, Owner | None]] = []
        self._noted: WeakKeyDictionary[Any, set[Owner]] = WeakKeyDictionary()

    def note(self, enclosing: list[Any], owner: Owner) -> None:
        """These enclose this forward, or a call in it."""
        for one in enclosing:
            self._noted.setdefault(one, set()).add(owner)

    def end(self, owner: Owner | None) -> None:
        """This forward is over; None: it raised."""
        self.ends.append((backward.sequence_number(), owner))

    def withdraw(self, owner: Owner) -> None:
        """A forward was left by an exception: its number is the next one's, its recomputes are nobody's."""
        for owners in self._noted.values():
            owners.discard(owner)

    def forget(self, oldest: Owner | None) -> None:
        """Drop the ends of forwards that no graph can recompute any more.

        Args:
            oldest: the first forward that one may recompute; None: there is none.
        """
        owners = [] if oldest is None else [owner for _, owner in self.ends]
        gone = owners.index(oldest) if oldest in owners else len(self.ends)
        if gone:
            self.since = self.ends[gone - 1][0]
            del self.ends[:gone]

    def find(self, chunk: int, where: str, running: Owner | None) -> Owner | None:
        """The forward that is run again now; None: none of this block. `running`: the one open forward.

        Raises:
            RecomputeError: autograd can't be asked here, or doesn't know.
        """
        if (problem := backward.probe()) is not None:
            raise RecomputeError(
                f"on torch {torch.__version__} a recompute can't be led back to its forward ({problem})",
                where=where,
                cause="what the brackets name: a broken package that torch imports, a patched checkpoint, "
                "or a torch that npu_replay doesn't know; mend it, or turn activation recompute off",
            )
        owners = self._on_stack(chunk)
        if len(owners) > 1:
            raise RecomputeError(
                "one checkpoint holds several forwards of the model, and their recomputes look alike",
                where=where,
                expected="a checkpoint for each forward",
                got=f"{len(owners)} forwards in one",
                cause="checkpoint() around a loop over micro-batches",
            )
        return owners.pop() if owners else self._by_number(where, running)

    def _on_stack(self, chunk: int) -> set[Owner]:
        """The forwards in what runs again now: in the innermost of it that was noted."""
        found = (
            {owner for owner in self._noted.get(one, ()) if owner[0] == chunk}
            for one in backward.recomputing()
        )
        return next(filter(None, found), set())

    def _by_number(self, where: str, running: Owner | None) -> Owner | None:
        """The forward in which autograd's running node was made."""
        number = backward.running_node_number()
        if number is None:
            raise RecomputeError(
                "a forward was run in backward, but by no node of the model's graph",
                where=where,
                cause="a forward run from a gradient hook or from an engine callback",
            )
        if number < self.since:
            return None
        at = bisect.bisect_right(self.ends, number, key=lambda end: end[0])
        return self.ends[at][1] if at < len(self.ends) else running


class _Around(weakref.ref[Any]):
    """What encloses a call, and the call's key."""

    __slots__ = ("key",)
    key: Key


class Recomputes:
    """The calls of routers that autograd may yet run again, and those that it has, by layer and micro-batch.

    Args:
        release: told of a call whose graph has died, in the next `settle`.
    """

    def __init__(self, release: Callable[[Key], None]) -> None:
        self._release = release
        self._around: dict[Key, list[_Around]] = {}
        self._ran: set[Key] = set()
        self._dead: deque[_Around] = deque()

    def __len__(self) -> int:
        return len(self._around)

    def __contains__(self, key: Key) -> bool:
        return key in self._around

    @property
    def oldest(self) -> Key | None:
        """The first call that autograd may yet run again."""
        return next(iter(self._around), None)

    def expect(self, key: Key, around: list[Any]) -> None:
        """Autograd may recompute this call as long as any of these lives, which enclose it."""
        # Told by C alone: Python swallows an interrupt that comes in a weak reference's callback.
        self._around[key] = [_Around(one, self._dead.append) for one in around]
        for one in self._around[key]:
            one.key = key

    def ran(self, key: Key) -> None:
        """The call was recomputed."""
        self._ran.add(key)

    def drop(self, key: Key) -> None:
        """The forward of this call raised."""
        self._around.pop(key, None)
        self._ran.discard(key)

    def settle(self) -> None:
        """Drop the calls whose graphs have died since."""
        while self._dead:
            key = getattr(self._dead[0], "key", None)
            if key in self._around and not self._may_come(key):
                self._release(key)
                self.drop(key)
            self._dead.popleft()

    def due(self) -> list[Key]:
        """The calls that autograd may yet recompute and hasn't."""
        return [key for key in self._around if key not in self._ran and self._may_come(key)]

    def clear(self) -> None:
        """The block is over."""
        self._around.clear()
        self._ran.clear()

    def _may_come(self, key: Key) -> bool:
        return any(one() is not None for one in self._around.get(key, ()))
