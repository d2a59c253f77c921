"""Find the running micro-batch, and the forward that a recompute repeats.

One micro-batch is one `__call__` of a model chunk. Whatever encloses its forward, or a router's call in it,
and may run it again (`backward.enclosing`) is noted: checkpoints around the loss, several layers and each
layer may all enclose one call. The innermost noted one that runs now tells a recompute's forward. Where none
runs, as in a tensor's hook, autograd's running node does: its number falls between the counters noted at the
ends of two forwards. Ends, since a reentrant checkpoint around the model makes its node before the forward.
A schedule that recomputes outside backward looks like a forward, so a compat module marks it (`Marks`).

`Recomputes` knows which calls autograd may still run again, and `KeptIds` holds the ids for them.
"""

from __future__ import annotations

import bisect
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

from npu_replay.errors import MicroBatchError, RecomputeError, RouterError, micro_batch
from npu_replay.sessions import backward
from npu_replay.sessions.torch_state import address

CALLED_INSIDE = (
    "the block was given a wrapper, and the loop calls the module inside it (model.module, say) or forward() "
    "itself, past the __call__ of what was given; give the block the module that the loop really calls"
)

Owner: TypeAlias = "tuple[int, int]"
"""The chunk and micro-batch of a recompute."""


@dataclass
class Forward:
    """Describes a running forward of a chunk."""

    chunk: int
    number: int
    grad: bool
    made: int  # autograd's sequence number when it began
    enclosing: list[Any] = field(default_factory=list)  # objects that may run it again
    handling: BaseException | None = None  # the exception being handled when it began
    called: set[int] = field(default_factory=set)  # layer labels of the routers called so far
    ended: list[Any] = field(default_factory=list)  # calls: router, ids, handed, version
    is_open: bool = True  # it runs
    checked: bool = False  # the whole effect is checked, not only that outputs show the ids
    # Of an unchecked forward, what its quick calls share; see `Answering.begins`:
    quick: bool = False
    given: Any = None  # its routes and their copies on the one device; None where routers choose
    rows: int = -1  # of the given routes; -1: not known
    compares: bool = False  # given ids are compared with the routers' own choice

    @property
    def owner(self) -> Owner:
        return self.chunk, self.number


class Timeline:
    """Numbers the forwards of each chunk since the block opened, and finds the forward of each recompute."""

    def __init__(self, chunks: int) -> None:
        self.ended = [0] * chunks  # how many forwards of each chunk
        self.bypassed: Forward | None = None  # a forward past the model's __call__
        self.had_grad = False
        self.threads: MicroBatchError | None = None  # the refusal of a second thread's forward
        # Autograd's sequence number after each forward, and its owner (None if it raised). Ascending, so that
        # a node is found by bisection.
        self.ends: list[tuple[int, Owner | None]] = []
        self._open: list[Forward | None] = [None] * chunks
        self._thread: int | None = None
        self._opened_on = threading.get_ident()
        self._since = backward.sequence_number()  # nodes below are older than the block
        # Weak, since what may run a forward again dies with its graph, and the block must not hold that.
        self._noted: WeakKeyDictionary[Any, set[Owner]] = WeakKeyDictionary()

    def begin(self, chunk: int) -> Forward:
        """Begin a chunk's forward; one that an exception left open is dropped."""
        self._check_thread(chunk)
        if (left := self._open[chunk]) is not None:  # an interrupt runs no forward hook
            self._withdraw(left)
        grad = torch.is_grad_enabled()
        self.had_grad |= grad
        enclosing = backward.enclosing(functions=not grad)
        made = backward.sequence_number()
        forward = Forward(chunk, self.ended[chunk], grad, made, enclosing, sys.exc_info()[1])
        self._note(enclosing, forward.owner)
        self._open[chunk] = forward
        return forward

    def running(self, chunk: int) -> Forward | None:
        return self._open[chunk]

    def end(self, chunk: int, output: object) -> tuple[Forward, bool] | None:
        """End a chunk's forward; return it and whether it completed. None if it never began."""
        forward = self._open[chunk]
        if forward is None or threading.get_ident() != self._thread:
            return None  # a second thread's forward was refused
        self._open[chunk] = None
        forward.is_open = False
        # A hook that is always called gets None after an exception, and runs while that is handled.
        raised = output is None and sys.exc_info()[1] is not forward.handling
        self.ends.append((backward.sequence_number(), None if raised else forward.owner))
        if raised:
            self._withdraw(forward)
        else:
            self.ended[chunk] += 1
        forward.enclosing = []  # a new list: its quick calls still hold this one, until their ids are kept
        return forward, not raised

    def live(self, chunk: int) -> Forward:
        """Return the forward that a router's call outside backward belongs to."""
        forward = self._open[chunk]
        if forward is not None:
            return forward
        if self.bypassed is None or self.bypassed.chunk != chunk:
            self._check_thread(chunk)
            made = backward.sequence_number()
            self.bypassed = Forward(chunk, self.ended[chunk], torch.is_grad_enabled(), made)
        return self.bypassed

    def enclosing(self, forward: Forward) -> list[Any]:
        """Return all that may repeat the router's call that begins now; each lives as long as it may."""
        # If grad was off when the forward began, nodes made since show that it was turned on.
        grows = forward.grad or backward.sequence_number() != forward.made
        inner = backward.enclosing(functions=grows and not torch.is_grad_enabled())
        if not inner:
            return forward.enclosing
        self._note(inner, forward.owner)
        return forward.enclosing + inner

    def recomputed(self, chunk: int, layer: int) -> int:
        """Return the micro-batch that a router's call inside backward recomputes.

        Raises:
            RecomputeError: it is none of this block, or can't be determined.
        """
        where = f"layer {layer}, in backward"
        if (problem := backward.probe()) is not None:
            problem = f"on torch {torch.__version__} the forward of a recompute can't be found ({problem})"
            cause = (
                "what the brackets name: a broken package that torch imports, a patched checkpoint, or a "
                "torch that npu_replay doesn't know; mend it, or turn activation recompute off"
            )
            raise RecomputeError(problem, where=where, cause=cause)
        found = (
            {owner for owner in self._noted.get(one, ()) if owner[0] == chunk}
            for one in backward.recomputing()
        )
        owners = next(filter(None, found), set())  # the innermost noted one that runs again
        if len(owners) > 1:
            problem = "one checkpoint holds several forwards of the model, and their recomputes look alike"
            got = f"{len(owners)} forwards in one"
            cause = "checkpoint() around a loop over micro-batches"
            expected = "a checkpoint for each forward"
            raise RecomputeError(problem, where=where, expected=expected, got=got, cause=cause)
        owner = owners.pop() if owners else self._owner_by_number(where)
        if owner is None or owner[0] != chunk:
            got = "a forward that raised, ran before the block, or went past the model's __call__"
            if owner is not None:
                got = f"micro-batch {owner[1]} of chunk {owner[0]}"
            expected = f"one of {self.ended[chunk]} micro-batches of chunk {chunk}"
            cause = (
                "forward and backward are not in the same block" if self.bypassed is None else CALLED_INSIDE
            )
            problem = "this recompute belongs to no forward of this block"
            raise RecomputeError(problem, where=where, expected=expected, got=got, cause=cause)
        # Backward of a checkpoint that this recompute makes may run on a thread without the outer one.
        self._note(backward.enclosing(functions=not torch.is_grad_enabled()), owner)
        return owner[1]

    def forget(self, oldest: Owner | None) -> None:
        """Drop the ends of forwards before the oldest that a graph can recompute; None drops all."""
        owners = [] if oldest is None else [owner for _, owner in self.ends]
        gone = owners.index(oldest) if oldest in owners else len(self.ends)
        if gone:
            self._since = self.ends[gone - 1][0]
            del self.ends[:gone]

    def _owner_by_number(self, where: str) -> Owner | None:
        """Return the forward between whose neighbours' ends the running node was made; None if of none."""
        number = backward.running_node_number()
        if number is None:
            problem = "a forward was run in backward, but by no node of the model's graph"
            cause = "a forward run from a gradient hook or from an engine callback"
            raise RecomputeError(problem, where=where, cause=cause)
        if number < self._since:
            return None
        at = bisect.bisect_right(self.ends, number, key=lambda end: end[0])
        if at < len(self.ends):
            return self.ends[at][1]
        running = [forward for forward in self._open if forward is not None]
        return running[0].owner if len(running) == 1 else None

    def _note(self, enclosing: list[Any], owner: Owner) -> None:
        for one in enclosing:
            self._noted.setdefault(one, set()).add(owner)

    def _withdraw(self, forward: Forward) -> None:
        """Remove a forward that raised: the next one gets its number, and its recomputes belong to none."""
        forward.is_open = False
        for owners in self._noted.values():
            owners.discard(forward.owner)

    def _check_thread(self, chunk: int) -> None:
        """Refuse a second thread: each has sequence numbers of its own, which order nothing between two."""
        thread = threading.get_ident()
        if self._thread is None:
            self._thread = thread
            if thread != self._opened_on:
                self._since = backward.sequence_number()
        if thread != self._thread:
            problem = "the forwards of one block come from two threads"
            where = micro_batch(self.ended[chunk])
            cause = "a model called from a thread pool; micro-batches can't be put in order there"
            self.threads = MicroBatchError(problem, where=f"chunk {chunk}, {where}", cause=cause)
            raise self.threads


class Marks:
    """Holds what is known of the next call of each router of one chunk."""

    def __init__(self, timeline: Timeline, chunk: int) -> None:
        self._timeline = timeline
        self._chunk = chunk
        self._foreseen: dict[int, Any] = {}
        self._announced: dict[int, int] = {}
        self.any = False  # something is known

    def running(self) -> int:
        """Return the number of the micro-batch that runs."""
        return self._timeline.live(self._chunk).number

    def foresee(self, router: nn.Module, token: object) -> None:
        """Note that the router's next forward may be run again while `token` lives; it is held weakly."""
        self._foreseen[id(router)] = token
        self.any = True

    def announce(self, router: nn.Module, number: int) -> None:
        """Note that the router's next call is the recompute of micro-batch `number`."""
        self._announced[id(router)] = number
        self.any = True

    def take_foreseen(self, router: nn.Module) -> Any:
        return self._foreseen.pop(id(router), None) if self._foreseen else None

    def take_announced(self, router: nn.Module) -> int | None:
        return self._announced.pop(id(router), None) if self._announced else None

    def clear(self) -> None:
        """Drop what no call has taken, because of an exception in between."""
        self._foreseen.clear()
        self._announced.clear()
        self.any = False


FEW = 2**17
"""Up to this number of ids, a router gets the tensor itself: a copy of each costs a kernel (1 MB)."""

_MANY = 2**23
"""So many ids are kept as int64 at most (64 MB), beside those of the running micro-batch."""

Key: TypeAlias = "tuple[int, int]"
"""A router's call: layer label and micro-batch."""


class _Around(weakref.ref[Any]):
    """Refers weakly to what encloses a call, and holds the call's key."""

    __slots__ = ("key",)
    key: Key


class Recomputes(dict[Key, list[_Around]]):
    """Holds the router calls that autograd may still run again, the oldest first, with what encloses each.

    `ran` holds those of them that it has run again.
    """

    def __init__(self) -> None:
        self.ran: set[Key] = set()
        self.any = False  # some call was held since the block opened
        self._dead: deque[_Around] = deque()

    def expect(self, key: Key, around: Sequence[Any]) -> None:
        """Note that autograd may recompute this call while any of `around`, which enclose it, lives."""
        self.any = True
        # The callback is a C function, since an interrupt in a weak reference's Python callback is lost.
        self[key] = [_Around(one, self._dead.append) for one in around]
        for one in self[key]:
            one.key = key

    def drop(self, key: Key) -> None:
        self.pop(key, None)
        self.ran.discard(key)

    def settle(self, release: Callable[[Key], object]) -> None:
        """Drop the calls whose graphs have died since, and call `release` with each."""
        while self._dead:
            key = getattr(self._dead[0], "key", None)
            if key is not None and key in self and not self._may_come(key):
                release(key)
                self.drop(key)
            self._dead.popleft()  # at last: after an interrupt the next `settle` does it again

    def due(self) -> list[Key]:
        """Return the calls that autograd may still recompute and hasn't."""
        return [key for key in self if key not in self.ran and self._may_come(key)]

    def clear(self) -> None:
        super().clear()
        self.ran.clear()

    def _may_come(self, key: Key) -> bool:
        return any(one() is not None for one in self[key])


class KeptIds(dict[Key, torch.Tensor]):
    """Keeps the ids of routers' calls in a narrow dtype, for their recomputes and for a record.

    Few ids stay int64 until `narrow`: a cast of each small tensor costs more than one of all.
    """

    def __init__(self) -> None:
        self.lost: dict[Key, torch.Tensor] = {}  # bool, the ids whose token was dropped, where any can be
        self._wide: dict[Key, torch.dtype] = {}  # of ids that are int64 still, the dtype to be
        self._numel = 0  # of these

    def keep(self, key: Key, ids: torch.Tensor, dtype: torch.dtype) -> None:
        """Keep int64 ids of a call in this dtype; the tensor itself is held until `narrow`."""
        if ids.numel() <= FEW and not ids.is_inference():
            self[key] = ids
            self._wide[key] = dtype
            self._numel += ids.numel()
        else:
            # A tensor made under inference_mode can't be saved for backward; its int64 copy can.
            self[key] = ids.to(dtype)

    def keep_all(self, keys: Sequence[Key], ids: Sequence[torch.Tensor], dtype: torch.dtype) -> None:
        """Keep int64 ids of several calls, as `keep` does; none of them was made under inference_mode."""
        sizes = [one.numel() for one in ids]
        if max(sizes) <= FEW:
            self.update(zip(keys, ids, strict=True))
            self._wide.update(dict.fromkeys(keys, dtype))
            self._numel += sum(sizes)
            return
        for key, one in zip(keys, ids, strict=True):
            self.keep(key, one, dtype)

    def narrow_many(self) -> None:
        """Cast what is still int64 if it has become much."""
        if self._numel > _MANY:
            self.narrow()

    def narrow(self) -> dict[Key, torch.Tensor]:
        """Cast what is still int64, tensors of one size together, and return all."""
        if not self._wide:
            return self
        self._numel = 0
        alike: dict[object, list[Key]] = {}
        places: dict[int, Key] = {}
        for key, dtype in self._wide.items():
            ids = self[key]
            alike.setdefault((ids.shape, ids.device, dtype), []).append(key)
            # A buffer in which several routers' ids lie holds only the last of them now.
            if ids.numel() and (first := places.setdefault(address(ids), key)) != key:
                self._wide.clear()
                problem = "the top-ks of several routers return their ids in one buffer, which is overwritten"
                cause = "a patched torch.topk, or a mode, that returns a static buffer (for graph capture)"
                raise RouterError(problem, where=micro_batch(first[1], first[0]), cause=cause)
        for keys in alike.values():
            cast = torch.stack([self[key] for key in keys]).to(self._wide[keys[0]])
            self.update(zip(keys, cast.unbind(), strict=True))
        self._wide.clear()
        return self

    def drop(self, key: Key) -> None:
        self.pop(key, None)
        self.lost.pop(key, None)
        self._wide.pop(key, None)

    def clear(self) -> None:
        super().clear()
        self.lost.clear()
        self._wide.clear()
