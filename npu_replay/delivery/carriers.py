"""Where routes lie between the worker that puts them and the ranks that read them."""

from __future__ import annotations

import itertools
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet, WeakValueDictionary

from npu_replay.delivery.references import Read, Reference, seal
from npu_replay.errors import InvalidRoutes, ReplayError, listed, whole_number
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.routes.routed_experts import RoutedExperts

DEFAULT_CUT = 8
"""Layers a piece, where the pipeline's split isn't known."""


class Carrier(ABC):
    """Puts routes away in pieces of layers, so that a pipeline stage reads its own.

    Args:
        cut: the job's ParallelLayout, with its decoder: a piece for each pipeline rank, with the layers of
            all its virtual stages; or the layers of each piece; or how many layers a piece has.
        budget: bytes of what this carrier put and nobody freed, above which `put` refuses more.
    """

    sealed = True
    """Does a reference seal its pieces, since others may come to where they lie?"""

    def __init__(self, *, cut: Any = DEFAULT_CUT, budget: int | None = None) -> None:
        self._cut = _pieces(cut)
        self._budget = None if budget is None else whole_number(budget, "budget", least=1)

    def put(self, routes: RoutedExperts, *, step: int = 0) -> Reference:
        """Put one sample's routes away; what it returns is read by `fetch`, in any process of the job.

        Args:
            routes: checked, as every RoutedExperts is; whoever fetches them checks no id again.
            step: of the job, which the reference will tell.

        Raises:
            ReplayError: no routes, layers that the cut has no piece for, or more than the budget.
        """
        return self.put_all([routes], step=step)[0]

    def put_all(self, samples: Iterable[RoutedExperts], *, step: int = 0) -> list[Reference]:
        """The same for several at once."""
        given = listed(list(samples), "the samples of put_all()")
        for one in given:
            InvalidRoutes.unless(
                isinstance(one, RoutedExperts), "these are no routes", "RoutedExperts", type(one).__name__
            )
        pieces = [[one.only(block) for block in self._blocks(one.layers)] for one in given]
        self._check_budget(sum(one.ids.nbytes for one in given))
        handles = self._store([piece for each in pieces for piece in each])
        found, at = [], iter(handles)
        for one, each in zip(given, pieces, strict=True):
            found.append(
                Reference(
                    one,
                    blocks=[piece.layers for piece in each],
                    seals=[seal(piece) if self.sealed else None for piece in each],
                    handles=list(itertools.islice(at, len(each))),
                    read=type(self).reader(),
                    release=type(self).releaser(),
                    step=step,
                )
            )
        return found

    def _check_budget(self, more: int) -> None:
        if self._budget is not None and (held := self._unfreed()) + more > self._budget:
            raise ReplayError(
                "these routes are more than may be held at once",
                expected=f"budget={self._budget} bytes at most",
                got=f"{more} bytes beside {held} that were put and not freed",
                cause="references of steps that are over and that nobody dropped or freed; or a small budget",
            )

    def _unfreed(self) -> int:
        """Bytes that this carrier put and nobody freed, where it is asked for a budget."""
        raise NotImplementedError

    def _blocks(self, layers: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The pieces of a sample with these layers."""
        if isinstance(self._cut, int):
            return [layers[first : first + self._cut] for first in range(0, len(layers), self._cut)]
        blocks = [tuple(layer for layer in block if layer in set(layers)) for block in self._cut]
        if lost := set(layers) - {layer for block in blocks for layer in block}:
            raise ReplayError(
                "the cut has no piece for some layers",
                expected=f"a piece for each of {list(layers)}",
                got=f"none for {sorted(lost)}",
                cause="the layout of another model, or of a part of the job",
            )
        return [block for block in blocks if block]

    @abstractmethod
    def _store(self, pieces: Sequence[RoutedExperts]) -> Sequence[Any]:
        """A handle for each piece."""

    @staticmethod
    @abstractmethod
    def reader() -> Read:
        """The function that reads these handles."""

    @staticmethod
    def releaser() -> Any:
        """The function that gives them free; None where nobody has to."""
        return None


def _pieces(cut: Any) -> int | list[tuple[int, ...]]:
    if isinstance(cut, ParallelLayout):
        if cut.decoder is None:
            raise ReplayError(
                "this layout doesn't tell the layers of a pipeline's stages",
                expected="a ParallelLayout with decoder=",
                got=cut,
                cause="a layout made by hand; give the layers of each piece, or how many one has",
            )
        # Two pieces would be joined by each rank, in memory of its own.
        return [layers for rank in range(cut.pp) if (layers := replace(cut, pp_rank=rank).moe_layers)]
    if isinstance(cut, (list, tuple)):
        blocks = [tuple(whole_number(layer, "a layer") for layer in listed(one, "a piece")) for one in cut]
        every = [layer for block in blocks for layer in block]
        ReplayError.unless(
            len({*every}) == len(every) and all(list(block) == sorted(block) for block in blocks),
            "these pieces overlap, or have layers out of order",
            "each layer in one piece, ascending",
            blocks,
            "both ends of a stage counted in",
        )
        return blocks
    return whole_number(cut, "layers a piece", least=1)


class ProcessCarrier(Carrier):
    """The process itself: for a loop whose rollout and trainer live in one. Freed with the last reference."""

    sealed = False

    def __init__(self, *, cut: Any = DEFAULT_CUT, budget: int | None = None) -> None:
        super().__init__(cut=cut, budget=budget)
        self._put: WeakSet[_Held] = WeakSet()

    def _store(self, pieces: Sequence[RoutedExperts]) -> Sequence[Any]:
        held = [_Held(piece) for piece in pieces]
        self._put.update(held)
        return held

    def _unfreed(self) -> int:
        return sum(one.piece.ids.nbytes for one in self._put)

    @staticmethod
    def reader() -> Read:
        return read_held


_PROCESS = secrets.token_hex(8)
_held: WeakValueDictionary[int, _Held] = WeakValueDictionary()
_numbers = itertools.count()


class _Held:
    """A piece that this process holds as long as a handle of it lives; a copy is the same handle."""

    def __init__(self, piece: RoutedExperts) -> None:
        self.piece, self.number = piece, next(_numbers)
        _held[self.number] = self

    def __reduce__(self) -> tuple[Any, ...]:
        return _found, (_PROCESS, os.getpid(), self.number)

    def __deepcopy__(self, memo: object) -> _Held:
        return self


class _Gone:
    """What a handle becomes in a process that doesn't hold the piece."""

    def __init__(self, why: str, *made: Any) -> None:
        self.why, self._made = why, made

    def __reduce__(self) -> tuple[Any, ...]:
        return _found, self._made


def _found(process: str, pid: int, number: int) -> _Held | _Gone:
    made = (process, pid, number)
    if (process, pid) != (_PROCESS, os.getpid()):
        return _Gone(f"put in process {pid}, read in {os.getpid()}: take a carrier that reaches both", *made)
    return _held.get(number) or _Gone("freed: no reference of this sample was alive", *made)


def read_held(handles: Sequence[Any], patience: float) -> list[RoutedExperts | Exception]:
    """The pieces that this process holds."""
    return [one.piece if isinstance(one, _Held) else LookupError(one.why) for one in handles]
