"""Keeps the routes of many samples: RouteStore in one folder, RoutesByTokens in memory.

A folder has safetensors shards (`encoding`), NAME-00000.safetensors, each with samples of one model. A shard
is written whole or not at all, so a job that dies leaves the shards that it had finished.
"""

from __future__ import annotations

import glob
import itertools
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from npu_replay.errors import InvalidRoutes, RouteFileError, whole_number
from npu_replay.routes.atomic_file import plain_file, reader, write_whole
from npu_replay.routes.checks import Array
from npu_replay.routes.encoding import Header, encode, read_errors_as
from npu_replay.routes.fingerprint import SampleKey, as_token_ids, find_other_tokens, fingerprint
from npu_replay.routes.mismatch import compare
from npu_replay.routes.routed_experts import RoutedExperts

SHARD_BYTES = 1 << 28
_ENDING = ".safetensors"
_DAMAGED = (
    "something else, a file that was cut short, changed or taken away, or another version of npu_replay"
)

logger = logging.getLogger(__name__)


class RouteStore(Mapping[str, RoutedExperts]):
    """Reads the routes in a folder by key; each is checked against its checksum when it is read.

    Two samples of the same tokens (a short answer of two ranks, a question about two images) are told apart
    by the `sample_key` that they are written and read with; reading one of several without it is an error.

    >>> tokens = [151644, 872, 198]
    >>> routes = npu_replay.RoutedExperts.unrecorded(3, layers=[0, 1], topk=2, num_experts=8)
    >>> with npu_replay.RouteStore.writer("folder", name="rank-0") as writer:
    ...     writer.add(routes.sequence(0, 3, npu_replay.fingerprint(tokens)))
    >>> npu_replay.RouteStore("folder").of(tokens)
    RoutedExperts(3 tokens, 2 layers, top-2 of 8, 3 rows without a route)

    Args:
        folder: the folder of the shards.
        shard: only this one, by its name without an ending; all when not given.

    Raises:
        RouteFileError: the folder holds no shard, or one that can't be read.
    """

    def __init__(self, folder: str | os.PathLike[str], *, shard: str | None = None) -> None:
        self.folder = Path(folder)
        self._headers: dict[Path, Header] = {}
        self._samples: dict[str, tuple[Path, dict[str, Any]]] = {}
        self._several: dict[str, Path] = {}
        """Maps a key that two shards have with different routes to the second shard."""
        self._of_tokens: dict[int, list[str]] = {}
        """Lists the keys that are fingerprints by their upper half, which identifies the tokens."""
        for path in sorted(self.folder.glob(f"{'*' if shard is None else glob.escape(shard)}{_ENDING}")):
            self._read_index(path)
        if not self._headers:
            raise RouteFileError(
                "there are no routes in this folder",
                where=str(self.folder),
                expected=f"NAME{_ENDING}",
                got="none",
                cause="another folder, or a job that ended before its first shard was full: close the writer",
            )

    def _read_index(self, path: Path) -> None:
        """Read which samples a shard holds."""
        with read_errors_as("the shard can't be read", _DAMAGED, path), plain_file(path) as file:
            header = Header.read(*reader(file))
        self._headers[path] = header
        for key, known in header.samples.items():
            _, first = self._samples.setdefault(key, (path, known))
            if first["digest"] != known["digest"]:
                self._several[key] = path
            elif first is known and (mark := known["fingerprint"]) is not None and key == key_of(mark):
                self._of_tokens.setdefault(mark >> 32, []).append(key)

    def __repr__(self) -> str:
        return f"RouteStore({str(self.folder)!r}, {len(self)} samples)"

    @staticmethod
    def writer(
        folder: str | os.PathLike[str], *, name: str = "routes", shard_bytes: int = SHARD_BYTES
    ) -> RouteWriter:
        """Start writing into a folder, which is made if it doesn't exist.

        Args:
            folder: the folder; other writers may write to it at the same time.
            name: a name for each writer (a rank, say). Shards of an earlier writer of this name are an error.
            shard_bytes: a shard is written when this many bytes of ids are waiting.
        """
        return RouteWriter(Path(folder), name, shard_bytes)

    def __getitem__(self, key: str) -> RoutedExperts:
        return self._read(key)

    def __contains__(self, key: object) -> bool:
        return key in self._samples

    def __iter__(self) -> Iterator[str]:
        return iter(self._samples)

    def __len__(self) -> int:
        return len(self._samples)

    def described(self, key: str) -> tuple[Path, dict[str, Any]]:
        """Return the shard of a sample, and its metadata."""
        return self._samples[key]

    def of(self, tokens: Any, *, sample_key: SampleKey = None) -> RoutedExperts:
        """Return the routes of one sequence of token ids, [tokens], with its sample_key, if it has one.

        Raises:
            RouteFileError: the store has no routes of this sample, or several samples have these tokens.
        """
        # The upper half of a fingerprint is the tokens', the lower the sample key's.
        mark = fingerprint(tokens, sample_key=sample_key)
        key = key_of(mark)
        same = self._of_tokens.get(mark >> 32, [])
        if sample_key is None and len(same) > 1:
            raise self._ambiguous(key, f"{len(same)} samples, {', '.join(same[:4])}")
        if key not in self:
            raise RouteFileError(
                "no routes of these tokens",
                where=str(self.folder),
                expected=f"{key} ({len(tokens)} tokens)",
                got=f"{len(self)} samples, of which {len(same)} have these tokens and another sample_key",
                cause="another batch or sample_key than was recorded, text that was tokenised again, a "
                "writer that holds them back until flush(), or a store that was opened before that",
            )
        routes = self._read(key, as_token_ids(tokens))
        if (other := find_other_tokens(len(routes), routes.fingerprint, len(tokens), mark)) is not None:
            raise other.error(
                RouteFileError,
                f"{self._samples[key][0]}, {key}",
                "a key of the caller's own that looks like a fingerprint",
            )
        return routes

    def _read(self, key: str, tokens: Array | None = None) -> RoutedExperts:
        shard, _ = self._samples[key]
        if key in self._several:
            raise self._ambiguous(key, f"other routes in {shard.name} and {self._several[key].name}")
        with (
            read_errors_as("the shard can't be read", _DAMAGED, f"{shard}, {key}"),
            plain_file(shard) as file,
        ):
            values = self._headers[shard].arguments(reader(file)[0], key)
            return RoutedExperts.of_decoded(values).check_not_constant(tokens)

    def _ambiguous(self, key: str, got: str) -> RouteFileError:
        return RouteFileError(
            "several samples have these tokens; which is meant?",
            where=f"{self.folder}, {key}",
            expected="a sample_key, in add() and in of(); or one writer's, RouteStore(folder, shard=...)",
            got=got,
            cause="the same question about other images, or one answer that two ranks sampled",
        )


class RouteWriter(AbstractContextManager["RouteWriter"]):
    """Writes samples into a folder, a shard at a time. See `RouteStore.writer`."""

    def __init__(self, folder: Path, name: str, shard_bytes: int) -> None:
        self.folder = folder
        self.name = name
        self.shard_bytes = shard_bytes
        self._keys: set[str] = set()
        self._waiting: dict[str, RoutedExperts] = {}
        self._model: tuple[Any, ...] | None = None
        self._bytes = 0
        # Each names one file, so that another try after a failure takes a new name.
        self._numbers = itertools.count()
        first = self._file(0)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            taken = first.exists()
        except OSError as error:
            raise RouteFileError(f"nothing can be written there ({error})", where=str(folder)) from error
        if taken:
            raise RouteFileError(
                "somebody has written here under this name",
                where=str(first),
                cause="an earlier job, or two ranks with one name: take another folder, or another name",
            )

    def add(self, routes: RoutedExperts, key: str | None = None, *, sample_key: SampleKey = None) -> None:
        """Write the routes of one sequence, under its fingerprint if no key is given.

        A sample_key becomes part of the fingerprint.

        Raises:
            RouteFileError: no key and no fingerprint, or the key is taken; or the disk is full.
        """
        if key is None:
            if routes.fingerprint is None:
                raise self._error(
                    "these routes have neither a key nor a fingerprint",
                    "add(routes, key), or a fingerprint when they were built",
                    routes,
                )
            routes = routes.of_sample(sample_key)
            key = key_of(routes.fingerprint or 0)
        if not isinstance(key, str):  # a JSON object's keys are texts, so its digest would be another
            raise self._error("bad key", "text", key)
        if key in self._keys:
            raise self._error(
                "the key is taken",
                "another key",
                key,
                "two samples of the same tokens: pass a key of your own, add(routes, key), or a sample_key; "
                "or one added twice",
            )
        model = routes.layers, routes.topk, routes.num_experts
        # A shard holds one model's routes, in arrays of one width.
        if model != self._model:
            self.flush()
            self._model = model
        self._keys.add(key)
        self._waiting[key] = routes
        self._bytes += routes.ids.nbytes
        if self._bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> str | None:
        """Write the waiting samples as one shard; return its name without an ending, or None."""
        if not self._waiting:
            return None
        # A rank that was given another one's name skips its shards, which weren't there when it began.
        shard = next(file for file in map(self._file, self._numbers) if not file.exists())
        samples = {key: routes.encodable() for key, routes in self._waiting.items()}
        write_whole(shard, *encode(samples), overwrite=False)
        self._waiting = {}
        self._bytes = 0
        return shard.stem

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.flush()

    def _error(self, problem: str, expected: str, got: object, cause: str = "") -> RouteFileError:
        return RouteFileError(problem, where=str(self.folder), expected=expected, got=got, cause=cause)

    def _file(self, number: int) -> Path:
        return self.folder / f"{self.name}-{number:05d}{_ENDING}"


def key_of(mark: int) -> str:
    """Return the key of a sequence with this fingerprint: 16 hexadecimal digits."""
    return f"{mark:016x}"


ONE_ANSWER = 0.1
"""Share of token-layers in which an engine's routes of one answer, sampled twice, may differ: it rounds
otherwise in another batch, which flips near ties."""


@dataclass(frozen=True)
class _Kept:
    """Holds the routes of one sequence, and where they come from.

    Attributes:
        rollout: a rollout gave them; else a record.
        updates: the number of updates before they came.
        renewed: an update lies between their record and one of other routes before it.
    """

    routes: RoutedExperts
    rollout: bool
    updates: int
    renewed: bool = False

    @property
    def size(self) -> int:
        return self.routes.ids.nbytes + self.routes.recorded.nbytes


class RoutesByTokens:
    """Holds the newest RoutedExperts of each sequence by its fingerprint, up to `max_bytes`.

    Between a rollout and its update, other routes of the same tokens are an error: they are another sample's.
    `dropped` counts sequences dropped for the bound, `replaced` those whose routes changed.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = whole_number(max_bytes, "max_bytes", least=1, most=2**63)
        self.bytes = self.dropped = self.replaced = 0
        self._kept: dict[int, _Kept] = {}
        self._waiting: set[int] = set()  # given by a rollout, and not asked for by an update since
        self._updates = 0

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, mark: int, *, update: bool = False) -> tuple[RoutedExperts | None, bool]:
        """Return the routes of the sample with this fingerprint, and whether a rollout gave them."""
        if update:
            self._waiting.discard(mark)
            self._updates += 1
        kept = self._kept.get(mark)
        return (None, False) if kept is None else (kept.routes, kept.rollout)

    def is_renewed(self, mark: int) -> bool:
        """Return whether an update lies between these routes' record and one of other routes before it."""
        return mark in self._kept and self._kept[mark].renewed

    def move(self, mark: int, to: int) -> None:
        """Give routes that a rollout put without a key to the first sample of their tokens that asks."""
        routes, rollout = self.get(mark)
        if mark != to and routes is not None and rollout:
            self._take_out(mark)
            self.put(to, routes, rollout=True)

    def put(self, mark: int, routes: RoutedExperts, *, rollout: bool) -> None:
        """Hold these routes; warn the first time that the oldest are dropped for them."""
        before = self._kept.get(mark)
        renewed = False
        if before is not None and not torch.equal(before.routes.ids, routes.ids):
            # An update takes a mark out of the waiting ones; until then a second sample is a mix-up.
            if rollout and mark in self._waiting:
                _check_one_answer(mark, before.routes, routes)
            renewed = not rollout and before.updates < self._updates
            self.replaced += 1
        if before is not None:
            renewed |= not rollout and before.renewed
            self._take_out(mark)
        if rollout:
            self._waiting.add(mark)
        if routes.ids.untyped_storage().nbytes() > routes.ids.nbytes:  # a view keeps its whole storage alive
            routes = routes.take(range(len(routes))).sequence(0, len(routes), mark)
        self._kept[mark] = _Kept(routes, rollout, self._updates, renewed)
        self.bytes += self._kept[mark].size
        while self.bytes > self.max_bytes:
            if not self.dropped:
                logger.warning(
                    "[npu_replay] routes of %d sequences fill max_bytes=%d; the oldest are dropped from now "
                    "on, and an update with one of them is an error",
                    *(len(self), self.max_bytes),
                )
            self._take_out(next(iter(self._kept)))
            self.dropped += 1

    def clear(self) -> None:
        """Drop all routes; the counts stay."""
        self._kept.clear()
        self._waiting.clear()
        self.bytes = 0

    def _take_out(self, mark: int) -> None:
        self._waiting.discard(mark)
        self.bytes -= self._kept.pop(mark).size


def _check_one_answer(mark: int, ours: RoutedExperts, theirs: RoutedExperts) -> None:
    """Refuse two rollouts' routes that are further apart than those of one answer, sampled twice."""
    if ours.weight_version != theirs.weight_version:
        return
    try:
        apart = compare(ours, theirs).router_mismatch
    except InvalidRoutes:  # they can't be compared
        apart = 1.0
    InvalidRoutes.unless(
        apart <= ONE_ANSWER,
        "two samples have the same tokens and other routes, and nothing tells them apart",
        expected="sample_key=, in put() and in the model's call; or routes that differ in "
        f"{ONE_ANSWER:.0%} of the token-layers at most, as those of one answer sampled twice do",
        got=f"fingerprint {mark:#018x} twice before an update, {apart:.0%} apart",
        cause="the same question about other images, or weights that changed in between",
    )
