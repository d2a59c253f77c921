"""Where routes lie between the worker that puts them and the ranks that read them."""

from __future__ import annotations

import itertools
import os
import secrets
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from npu_replay.delivery.references import Read, Reference, seal
from npu_replay.errors import InvalidRoutes, ReplayError, listed, whole_number
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.routes.store import RouteStore, RouteWriter

DEFAULT_CUT = 8
"""Layers a piece, where the pipeline's split isn't known."""
_ONE_SHARD = 2**62
"""Bytes: each `put_all` is a shard of its own."""


class Carrier(ABC):
    """Puts routes away in pieces of layers, so that a pipeline stage reads its own.

    Args:
        cut: the job's ParallelLayout, with its decoder: a piece for each pipeline rank, with the layers of
            all its virtual stages; or the layers of each piece; or how many layers a piece has.
    """

    sealed = True
    """Is a piece sealed, since the carrier has no digest of its own?"""

    def __init__(self, *, cut: Any = DEFAULT_CUT) -> None:
        self._cut = _pieces(cut)

    def put(self, routes: RoutedExperts, *, step: int = 0) -> Reference:
        """Put one sample's routes away; what it returns is read by `fetch`, in any process of the job.

        Args:
            routes: checked, as every RoutedExperts is; whoever fetches them checks no id again.
            step: of the job, which the reference will tell.

        Raises:
            ReplayError: no routes, or layers that the cut has no piece for.
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
        return [tuple(whole_number(layer, "a layer") for layer in listed(block, "a piece")) for block in cut]
    return whole_number(cut, "layers a piece", least=1)


class ProcessCarrier(Carrier):
    """The process itself: for a loop whose rollout and trainer live in one. Freed with the last reference."""

    sealed = False

    def _store(self, pieces: Sequence[RoutedExperts]) -> Sequence[Any]:
        return [_Held(piece) for piece in pieces]

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


class FolderCarrier(Carrier):
    """A folder on a disk that all nodes see: a shard for each `put_all`. Needs npu-replay[files].

    Nobody counts readers there: `free` removes shards, of all their samples.

    Args:
        folder: made if it isn't there.
        name: of this writer; one is made up if none is given.
        cut: see Carrier.
    """

    sealed = False  # a shard has a digest of each piece

    def __init__(
        self, folder: str | os.PathLike[str], *, name: str | None = None, cut: Any = DEFAULT_CUT
    ) -> None:
        super().__init__(cut=cut)
        made_up = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._writer: RouteWriter = RouteStore.writer(folder, name=name or made_up, shard_bytes=_ONE_SHARD)

    def _store(self, pieces: Sequence[RoutedExperts]) -> Sequence[Any]:
        keys = [f"{secrets.token_hex(8)}" for _ in pieces]
        for key, piece in zip(keys, pieces, strict=True):
            self._writer.add(piece, key)
        shard = self._writer.flush()
        return [(str(self._writer.folder), shard, key) for key in keys]

    @staticmethod
    def reader() -> Read:
        return read_folder

    @staticmethod
    def releaser() -> Any:
        return remove_shards


def read_folder(handles: Sequence[Any], patience: float) -> list[RoutedExperts | Exception]:
    """The pieces of shards; each shard's index is read once."""
    stores: dict[tuple[str, str], RouteStore | Exception] = {}

    def piece(folder: str, shard: str, key: str) -> RoutedExperts | Exception:
        try:
            if (folder, shard) not in stores:
                stores[folder, shard] = RouteStore(folder, shard=shard)
            store = stores[folder, shard]
            return store if isinstance(store, Exception) else store[key]
        except (ReplayError, OSError, KeyError) as error:
            return error

    return [piece(*handle) for handle in handles]


def remove_shards(handles: Sequence[Any]) -> None:
    """Remove the shards that these lie in, each index first."""
    for folder, shard in {(folder, shard) for folder, shard, _ in handles}:
        for file in (Path(folder, f"{shard}.index.json"), Path(folder, f"{shard}.safetensors")):
            file.unlink(missing_ok=True)
