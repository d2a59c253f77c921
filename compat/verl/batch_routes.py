"""Defines what a batch of verl carries for routes, and the store of the routes that keys stand for.

A batch has ids, int16 [tokens, columns, topk] a sample. In their place it may have a mark a token beside a
column of references (R3, by `r3_store`), or a key of five int16 a token (R2): all ranks of a replica compute
it alike, and each keeps the rows of whole samples in its own layers. Marks and keys are padded, cut, packed
and reordered as rows of ids are. During a pass an R3 batch always has keys, and its engine's `RoutesByKey`
holds the routes behind them, of this rank's layers.

Probes nothing and changes nothing. NPU_REPLAY_DELIVERY is read here alone, by `by_reference`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from npu_replay.environment import DELIVERY, read
from npu_replay.errors import InvalidRoutes
from npu_replay.parallel.collect import exchange
from npu_replay.parallel.merge import side_by_side
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.checks import Array
from npu_replay.routes.fingerprint import find_other_length
from npu_replay.routes.routed_experts import RoutedExperts

COLUMN = "npu_replay_routes"
"""The column of references."""
MARK = 32767
"""The first of a token's five numbers. It is no id and no padding, and doesn't fit a byte, to which verl
up to 0.9.0 narrows a batch whose numbers all fit.
"""
REFUSED = MARK - 1
"""The mark of a sample whose routes were refused at rollout."""
_FILLERS = np.iinfo(np.uint8).max, np.iinfo(np.int16).max
"""The ids that fill `refused_rows`: no expert's, or one that such a row names several times."""
_STAYED = 1
"""The key of a sample that came without its reference."""
_WORDS = 5
_FIELDS = "extra_fields"
_STEPS = 2
"""The number of steps that routes are kept: a trainer may record a step before it trains on the last one."""
_PASSES = 8
"""The number of passes taken for one step if none was trained on, as while only a critic is trained.
verl's trainers record a step in one.
"""

Routes = RoutedExperts | InvalidRoutes
"""The routes of a sample, or why there are none."""


def by_reference() -> bool:
    """Return whether the user keeps ids out of batches, in R2 and R3 alike."""
    return bool(read(DELIVERY))


class RoutesByKey:
    """Holds the routes of one engine in this process, of this rank's layers, for all passes of a step."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[int, Routes]] = {}
        self.layers: tuple[int, ...] = ()
        self.lent: Mapping[int, Routes] = {}
        """The routes of the running pass, whose batch carried the ids itself."""

    def __len__(self) -> int:
        return len(self._held)

    def has(self, layers: tuple[int, ...]) -> None:
        """Set this rank's layers, and drop the routes of others."""
        if layers != self.layers:
            self._held.clear()
            self.layers = layers

    def keep(self, key: int, routes: Routes, step: int) -> None:
        self._held[key] = step, routes

    def add_layers(self, key: int, routes: RoutedExperts, step: int) -> None:
        """Add the routes of one chunk of this rank beside those of its others."""
        known = self._held.get(key, (0, None))[1]
        self.keep(key, side_by_side([known, routes]) if isinstance(known, RoutedExperts) else routes, step)

    def drop_before(self, oldest: int, steps: Mapping[int, int] | None = None) -> None:
        """Drop the routes of older steps; `steps` are the new ones of samples that are held."""
        aged = ((key, (steps or {}).get(key, step), routes) for key, (step, routes) in self._held.items())
        self._held = {key: (step, routes) for key, step, routes in aged if step >= oldest}

    def lacking(self, keys: Iterable[int]) -> list[int]:
        return sorted(set(keys) - self._held.keys())

    def bad(self, keys: Iterable[int]) -> dict[int, InvalidRoutes]:
        """Return why some of these samples have no routes, by key."""
        entries = ((key, self._held[key][1]) for key in keys)
        return {key: routes for key, routes in entries if isinstance(routes, InvalidRoutes)}

    def refuse(self, bad: Mapping[int, Routes]) -> None:
        """Replace the routes of samples that another rank can't read by the reason."""
        for key in bad.keys() & self._held.keys():
            self.keep(key, bad[key], self._held[key][0])

    @property
    def usable(self) -> dict[int, RoutedExperts]:
        """Return the samples that have routes, by key."""
        return {key: routes for key, (_, routes) in self._held.items() if isinstance(routes, RoutedExperts)}

    @property
    def nbytes(self) -> int:
        return sum(routes.ids.nbytes for routes in self.usable.values())

    def of(self, key: int) -> RoutedExperts:
        """Return the routes behind a key; raises InvalidRoutes where there are none."""
        routes = self.lent.get(key) or self._held.get(key, (0, None))[1]
        if isinstance(routes, RoutedExperts):
            return routes
        if routes is not None:
            raise routes
        if not key:
            raise refused_at_rollout()
        raise InvalidRoutes(
            "the routes behind this sample's key aren't here",
            where=f"key {key:016x}",
            expected=f"R3: the column {COLUMN} beside routed_experts; R2: a record by this job's ranks, of "
            "this step or the one before",
            got=f"{len(self)} other samples",
            cause="a trainer that picks single columns of its batches; workers that were started anew since. "
            f"Without {DELIVERY} batches carry the ids",
        )

    def of_sample(self, rows: torch.Tensor, keep: torch.Tensor | None, model: RoutedModel) -> RoutedExperts:
        """Return the routes of a sample by its keys, [tokens, 1, 5]; `keep`, bool [tokens], are replayed."""
        words = rows[:, 0].to("cpu", torch.int16)
        marked = words[:, 0] >= REFUSED
        if not bool(marked.any()):  # a rollout without routes
            return RoutedExperts.unrecorded(
                len(words), layers=self.layers, topk=model.topk, num_experts=model.num_experts
            )
        keys = words[marked]
        InvalidRoutes.unless(
            bool((keys == keys[0]).all()),
            "the rows of a sample belong to several",
            "one key in all rows",
            "others",
            "a batch that was put together token by token",
        )
        routes = self.of(_key(keys[0]))
        wrong_length = find_other_length(len(routes), len(words))
        if wrong_length is not None:
            raise wrong_length.error(InvalidRoutes, "")
        here = marked if keep is None else marked & keep.detach().cpu().bool()
        # Ids aren't copied here: laying out a micro-batch copies the rows that it has.
        return routes.with_rows(routes.ids, routes.recorded & here[: len(routes)])


def refused_at_rollout() -> InvalidRoutes:
    """Return the error for a sample whose routes were refused in a worker of the agent loops."""
    return InvalidRoutes(
        "these routes were refused when the rollout handed them over",
        expected="routes that passed validation at rollout",
        got="none",
        cause="the log of the agent loops' worker has the error",
    )


def refused_rows(tokens: int, like: Array) -> Array:
    """Return the rows of a sample that a trainer refuses, in the shape of `like`, [0, layers, topk]."""
    dtype = np.int16 if like.shape[2] == 1 else like.dtype  # expert 255 may be a row of its own there
    return np.full((tokens, *like.shape[1:]), np.iinfo(dtype).max, dtype)


def are_refused(rows: torch.Tensor, num_experts: int) -> bool:
    """Return whether these are `refused_rows`, [tokens, layers, topk], in whatever dtype they have come."""
    if not rows.numel():
        return False
    filler = int(rows[0, 0, 0])
    is_filler = filler in _FILLERS and (filler >= num_experts or rows.shape[2] > 1)
    return is_filler and bool((rows[0] == filler).all())


class R2Store:
    """Keeps what the passes of one engine record, and gives each sample its key.

    A sample that another replica trains on moves once, before its first update.
    """

    def __init__(self, store: RoutesByKey) -> None:
        self._held = store
        self._step = self._passes = 0
        self._trained = False
        self._place = ""
        self._seen: Counter[int] = Counter()

    def begin(self, salt: int, replica: int) -> None:
        """Begin a pass that records; drops what is older than the step before.

        The salt is a random number of the pass, equal on all ranks, so that no other pass has its keys, also
        one of restarted workers. The replica is the data-parallel rank.
        """
        if self._trained or self._passes == _PASSES:
            self._step = self._step + 1
            self._passes = 0
            self._trained = False
            self._held.drop_before(self._step - _STEPS + 1)
        self._passes += 1
        self._place = f"{salt} {replica}"
        self._seen.clear()

    def trained(self) -> None:
        """Note that a pass trains: the next one that records begins a step."""
        self._trained = True

    def keep(self, chunk: int, samples: int, routes: Sequence[RoutedExperts]) -> list[int]:
        """Keep the routes of a chunk's next micro-batch, none if its layers are dense; return the keys."""
        places = (f"{self._place} {self._seen[chunk]} {number}".encode() for number in range(samples))
        keys = [int.from_bytes(blake2b(place, digest_size=8).digest(), "little") for place in places]
        self._seen[chunk] += 1
        for key, of_key in zip(keys, routes, strict=False):
            self._held.add_layers(key, of_key, self._step)
        return keys

    def fetch(self, lacking: Sequence[int], group: Any) -> None:
        """Fetch what another data-parallel rank recorded. Every rank of the group has to call it."""
        for key, routes in exchange(self._held.usable, lacking, group).items():
            self._held.keep(key, routes, self._step)


def rows_of(key: int | None, tokens: int) -> torch.Tensor:
    """Return the rows of a sample's key, int16 [tokens, 1, 5]; zeros without one."""
    if key is None:
        return torch.zeros(tokens, 1, _WORDS, dtype=torch.int16, device="cpu")
    words = [MARK, *np.array([key], np.uint64).view(np.int16).tolist()]
    return torch.tensor(words, dtype=torch.int16, device="cpu").repeat(tokens, 1, 1)


def keys_in(routes: Any, references: Sequence[Any] | None = None) -> list[int | None]:
    """Return the key of each sample, None for padding; an empty list where a batch has ids.

    The routes are ids, keys [batch, tokens, 1, 5], or marks [batch, tokens, 1, 1] of the references.
    """
    if routes is None or not are_keys(routes, fetched=references is not None):
        return []
    each = routes.detach().to("cpu", torch.int16).unbind()
    firsts = [rows[rows[:, 0, 0] >= REFUSED][:1, 0] for rows in each]
    keys = [_key(words[0]) if len(words) else None for words in firsts]
    if references is None:
        return keys
    pairs = zip(keys, references, strict=False)
    return [reference.key if key == _STAYED and reference is not None else key for key, reference in pairs]


def _key(words: torch.Tensor) -> int:
    if len(words) == 1:
        return _STAYED if int(words[0]) == MARK else 0
    return int(words[1:].numpy().view(np.uint64)[0])


def are_keys(routes: torch.Tensor, *, fetched: bool = False) -> bool:
    """Return whether a batch has keys, [batch, tokens, 1, 5], or marks in the place of routes."""
    if routes.dim() != 4 or tuple(routes.shape[-2:]) not in ((1, 1), (1, _WORDS)):
        return False
    flat = routes.values() if routes.is_nested else routes
    # A batch of samples without routes is zeros alone: keys only where this engine has fetched routes.
    return bool((flat[..., 0, 0] >= REFUSED).any()) or (fetched and not bool(flat.any()))


def references_in(data: Any) -> list[Any] | None:
    """Return the column of references of an engine's batch; None where it has none."""
    column = listed(data.get(COLUMN, None))
    if column is None and (fields := listed(data.get(_FIELDS, None))) is not None:  # by way of TransferQueue
        column = [sample.get(COLUMN) if isinstance(sample, Mapping) else None for sample in fields]
        column = column if any(entry is not None for entry in column) else None
    return column


def listed(column: Any) -> list[Any] | None:
    """Return a batch's column of anything but tensors as a list."""
    return None if column is None else list(column.tolist() if hasattr(column, "tolist") else column)


@contextmanager
def keys_in_place(data: Any, name: str, keys: Sequence[int | None]) -> Iterator[None]:
    """Put keys, if any, in the place of a batch's routes or marks for the length of a block."""
    if not keys:
        yield
        return
    column = data[name]
    rows = [rows_of(key, len(sample)) for key, sample in zip(keys, column.unbind(), strict=True)]
    data[name] = torch.nested.as_nested_tensor(rows, layout=torch.jagged).to(column.device)
    try:
        yield
    finally:
        data[name] = column
