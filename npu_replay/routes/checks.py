"""Holds every rule about an array of expert ids, [tokens, layers, topk], in one place.

An array is read in blocks that stay in the processor's cache. A function returns what is wrong as a
`Finding`, or its places; the caller adds whose array it is and the usual cause.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeGuard, TypeVar

import numpy as np

from npu_replay.errors import ReplayError

Array: TypeAlias = "np.ndarray[Any, Any]"

_log = logging.getLogger(__name__)
_Error = TypeVar("_Error", bound=ReplayError)

MAX_EXPERTS = 32_767  # int16
MAX_LAYERS = 4_096
"""The limit of a model's layers, ten times those of the deepest; a larger number counts something else."""
MAX_TOKENS = 1 << 31
CONSTANT_ROWS = 64
"""The least number of equal rows that may make a constant layer a fault."""
SURE_BITS = 96
"""Equal rows are a fault if the probability of that by chance is below 2**-96."""
COPIED_PART = 20
COPIED_TOKENS = 4
"""Copies are a fault if they are more than one in COPIED_PART rows, of at least COPIED_TOKENS different
tokens. The tokens after the first attend to little else, so two or three may rightly choose what it chose."""

OUTSIDE_CAUSE = (
    "ids that were narrowed on the way, a sentinel such as -1 (mark those rows with recorded=), ids of "
    "another model, or physical ids under EPLB"
)
TWICE_CAUSE = (
    "rows that were never captured and are all zeros, or padding that was given expert 0: mark rows without "
    "a route with recorded="
)
CONSTANT_CAUSE = (
    "the rollout engine didn't capture this layer (its buffer was never bound, or the layer is dense and its "
    "column must be dropped by label)"
)
"""The usual causes, for callers that know no better one."""

_MOST_SHIFTS = 64  # a larger top-k is sorted, as each shift costs a pass
_PLACES = 8  # words of a row
_BLOCK = 1 << 17  # ids; the fastest of 2**14 to 2**20, for ids of one byte and of two


@dataclass(frozen=True)
class Finding:
    """Describes a broken rule in an error's words; `column` is that of the first place, if it has one."""

    problem: str
    expected: str
    got: object
    column: int | None = None
    cause: str = field(default="", repr=False)

    def layer(self, layers: tuple[int, ...]) -> str:
        """Return the layer's name, «layer 5», by the labels of the columns."""
        return "" if self.column is None else f"layer {layers[self.column]}"

    def error(self, kind: type[_Error], where: str, cause: str = "") -> _Error:
        """Make an error of this kind, with the caller's cause if there is one."""
        cause = cause or self.cause
        return kind(self.problem, where=where, expected=self.expected, got=self.got, cause=cause)


@functools.lru_cache(maxsize=16)
def choice(num_experts: int, topk: int) -> float:
    """Return the number of choices that a token has in a layer, in bits: 40.4 for 8 of 128 experts."""
    return math.log2(math.comb(num_experts, topk))


def tells_apart(layers: int, num_experts: int, topk: int) -> bool:
    """Return whether the layers leave so many choices that two tokens never choose alike by chance."""
    return layers * choice(num_experts, topk) >= SURE_BITS


def is_ids(value: Any) -> TypeGuard[Array]:
    """Return whether this is an array of integers, [tokens, layers, topk]."""
    return isinstance(value, np.ndarray) and value.ndim == 3 and value.dtype.kind in "iu"


def find_outside(
    ids: Array, num_experts: int, recorded: Array | None = None, first_row: int = 0
) -> Finding | None:
    """Find an id that is no expert's, or a dtype that can't hold every expert (ids were truncated then).

    Rows that aren't `recorded`, bool [tokens], aren't checked; messages call row 0 `first_row`.
    """
    if (most := np.iinfo(ids.dtype).max) < num_experts - 1:
        return Finding(
            "the ids' dtype can't hold every expert", f"0 to {num_experts - 1}", f"{ids.dtype}, 0 to {most}"
        )
    outside = [np.empty((0, 3), np.int64)]
    unsigned = ids.view(
        ids.dtype.str.replace("i", "u")
    )  # a negative id becomes a large one, so one test finds both
    for first, block in _blocks(unsigned):
        if block.max() >= num_experts:  # this is rare, so the places are searched only then
            wrong = block >= num_experts
            if recorded is not None:
                wrong &= recorded[first : first + len(block), None, None]
            outside.append(np.argwhere(wrong) + np.array([first, 0, 0]))
    places = np.concatenate(outside)
    if not len(places):
        return None
    row, column, slot = places[0].tolist()
    count = len(np.unique(places[:, :2], axis=0))
    return Finding(
        f"an id is out of range, the first in row {first_row + row} ({count} such token-layers)",
        f"ids from 0 to {num_experts - 1}",
        int(ids[row, column, slot]),
        column,
    )


def find_twice(ids: Array, recorded: Array, first_row: int = 0) -> Finding | None:
    """Find an expert that a token-layer names twice; see `find_outside` for the arguments."""
    places = named_twice(ids, recorded)
    if not len(places):
        return None
    row, column = places[0].tolist()
    layers = len(np.unique(places[:, 1]))
    among = f" in {layers} layers" if layers > 1 else ""
    return Finding(
        f"{len(places)} token-layers{among} name an expert twice, the first in row {first_row + row}",
        f"{ids.shape[2]} different experts a token",
        ids[row, column].tolist(),
        column,
    )


def find_constant(
    ids: Array, recorded: Array, num_experts: int, tokens: Array | None = None, layers: tuple[int, ...] = ()
) -> Finding | None:
    """Find a layer in which all recorded rows are wrongly the same; engines fail so without an error.

    It is a fault if it holds zeros, or 0 to k - 1 in order, as a buffer does that was never written; or if no
    layer varies. Any other, beside layers that vary, comes from a dead router: a warning names it by
    `layers`, the columns' labels. Nothing is a fault if rows, different `tokens` (None: all differ) or
    experts are so few that tokens may choose alike.
    """
    at = np.flatnonzero(recorded)
    if len(at) < CONSTANT_ROWS or not (ids[at[0]] == ids[at[-1]]).all(axis=1).any():
        return None
    different = len(at) if tokens is None else len(np.unique(tokens[at]))
    if (different - 1) * choice(num_experts, ids.shape[2]) < SURE_BITS:
        return None
    columns = constant_columns(ids if len(at) == len(ids) else ids[at])
    # What a buffer holds that was never written: zeros, or 0 to k - 1 in order.
    row = ids[at[0], columns]
    unwritten = (row == 0).all(axis=1) | (row == np.arange(ids.shape[2])).all(axis=1)
    wrong = columns if len(columns) == ids.shape[1] else columns[unwritten]
    if not len(wrong):
        if len(columns) and layers:
            _warn_of_dead_routers(tuple(layers[column] for column in columns))
        return None
    column = int(wrong[0])
    return Finding(
        f"all {len(at)} recorded rows are the same (in {len(wrong)} of the layers)",
        "routes that depend on the token",
        f"{ids[at[0], column].tolist()} in every row",
        column,
    )


@functools.cache  # warns once per process
def _warn_of_dead_routers(layers: tuple[int, ...]) -> None:
    _log.warning(
        "[npu_replay] layer %s sends all tokens to the same experts, and other layers don't: its router has "
        "collapsed or was never trained, or the engine repeats one row there. The rows are used as they are",
        ", ".join(map(str, layers)),
    )


def named_twice(ids: Array, recorded: Array) -> Array:
    """Return the recorded token-layers that name an expert twice: [n, 2] int64, row and column, in order."""
    topk = ids.shape[2]
    places = [np.empty((0, 2), np.int64)]
    for first, block in _blocks(ids) if topk > 1 else ():
        if topk > _MOST_SHIFTS or _may_name_twice(block):
            rows = np.flatnonzero(recorded[first : first + len(block)])
            ordered = np.sort(block[rows], axis=2)
            at = np.argwhere((ordered[..., 1:] == ordered[..., :-1]).any(axis=2))
            places.append(np.stack([first + rows[at[:, 0]], at[:, 1]], axis=1))
    return np.concatenate(places)


def constant_columns(ids: Array) -> Array:
    """Return the columns in which all rows are the same, [n] int64; none if there are no rows."""
    if ids.size == 0:
        return np.empty(0, np.int64)
    # The first and the last row rule out most columns before all rows are read.
    suspects = np.flatnonzero((ids[0] == ids[-1]).all(axis=1))
    constant: Array = suspects[(ids[:, suspects] == ids[0, suspects]).all(axis=(0, 2))]
    return constant


def blank_rows(ids: Array, value: int = 0) -> Array:
    """Return the rows that hold nothing but this value, [n] int64."""
    if ids.size == 0:
        return np.empty(0, np.int64)
    suspects = np.flatnonzero(ids[:, 0, 0] == value)  # rules out most rows before all ids are read
    return suspects.compress((ids[suspects] == value).all(axis=(1, 2)))


def rows_without_route(ids: Array, num_experts: int) -> dict[str, Array]:
    """Return the rows of MoE layers that stand for no route, [n] int64, by what they hold in all layers.

    A row is zeros where it was never written, -1 where it was lost, and consecutive ids where somebody
    padded, so that no expert is named twice. Rows that an engine may have chosen by chance aren't among them.
    """
    layers, topk = ids.shape[1:]
    sure = tells_apart(layers, num_experts, topk)
    blank = {"-1": blank_rows(ids, -1) if ids.dtype.kind == "i" else np.empty(0, np.int64)}
    if sure or topk > 1:
        blank["zeros"] = blank_rows(ids)
    if sure and topk > 1:
        blank["consecutive ids"] = _consecutive_rows(ids, num_experts)
    return {what: rows for what, rows in blank.items() if len(rows)}


def _consecutive_rows(ids: Array, num_experts: int) -> Array:
    """Return the rows that hold k consecutive ids in every layer."""
    layers, topk = ids.shape[1:]
    heads = ids[:, 0, :2].astype(np.int64)
    suspects = np.flatnonzero((heads[:, 1] - heads[:, 0]) % num_experts == 1)
    rows = ids[suspects].astype(np.int64)
    steps = (rows - rows[:, :, :1]) % num_experts == np.arange(topk)
    fits = steps.all(axis=(1, 2))
    # From 0 on they are always padding; from elsewhere only beside others, and where chance is ruled out.
    anywhere = layers * (choice(num_experts, topk) - math.log2(num_experts)) >= SURE_BITS
    if not anywhere or fits.sum() == len(ids):
        fits &= (rows[:, :, 0] == 0).all(axis=1)
    return suspects.compress(fits)


def repeated_rows(ids: Array, tokens: Array) -> Array:
    """Return the rows, [n] int64, that equal an earlier one, the nearest of which is another token's."""
    if len(ids) < 2 or ids.size == 0:
        return np.empty(0, np.int64)
    words = _words(ids)
    # A key: a hash of the row above its number. Equal rows become neighbours.
    half = np.uint64(0xFFFF_FFFF)
    keys = np.sort(_hashes(words) & ~half | np.arange(len(words), dtype=np.uint64))
    at = np.flatnonzero((keys[1:] ^ keys[:-1]) <= half)  # the same hash as the one before
    rows = (keys[at + 1] & half).astype(np.int64)
    others = (keys[at] & half).astype(np.int64)
    apart = tokens[rows] != tokens[others]
    rows, others = rows[apart], others[apart]
    return np.sort(rows[(words[rows] == words[others]).all(axis=1)])


def copied_rows(ids: Array, recorded: Array, num_experts: int, tokens: Array) -> Array:
    """Return the rows of `repeated_rows` if they are too many, else none; see `find_constant`."""
    none = np.empty(0, np.int64)
    least = int(recorded.sum()) // COPIED_PART + 1
    if ids.size == 0 or not tells_apart(ids.shape[1], num_experts, ids.shape[2]):
        return none
    # Few rows of a right sample agree in a few places of all layers, which is seen before all ids are read.
    words = _words(ids)
    few = np.sort((_hashes(words[:, :: -(-words.shape[1] // _PLACES)]) >> 32).astype(np.uint32))
    if (few[1:] == few[:-1]).sum() < least:
        return none
    if not recorded.all():  # rows of zeros get one token, so none copies another's
        tokens = np.where(recorded, tokens[: len(ids)], -1)
    rows = repeated_rows(ids, tokens)
    return rows if len(rows) >= least and len(np.unique(tokens[rows])) >= COPIED_TOKENS else none


def _words(ids: Array) -> Array:
    """View each row as words, [tokens, words], the largest that it can be cut into."""
    flat = np.ascontiguousarray(ids).reshape(len(ids), -1).view(np.uint8)
    words: Array = flat.view(next(f"u{size}" for size in (8, 4, 2, 1) if flat.shape[1] % size == 0))
    return words


def _hashes(words: Array) -> Array:
    """Return a hash of each row, [tokens] uint64."""
    weights = np.random.default_rng(0).integers(0, 2**63, words.shape[1], dtype=np.uint64)
    hashes: Array = words @ (weights * 2 + 1)  # odd weights lose no bits
    return hashes


def _blocks(ids: Array) -> Iterator[tuple[int, Array]]:
    """Yield some rows at a time, with the number of the first; nothing of an array without ids."""
    step = max(1, _BLOCK // ids[0].size) if ids.size else 1
    for first in range(0, len(ids) if ids.size else 0, step):
        yield first, ids[first : first + step]


def _may_name_twice(block: Array) -> bool:
    """Return False only if no token-layer names an expert twice."""
    # The flat ids are xored with themselves, shifted by 1 to topk - 1 places; equal ids give 0, and the least
    # of all shifts is looked at once. Ids of neighbouring token-layers are compared, too: the marks give
    # every second one a bit that no id has, so these never are equal.
    topk = block.shape[2]
    narrow = np.uint8 if block.max() < 1 << 7 else np.uint16
    marks = _marks(topk, max(_BLOCK, block.size), np.dtype(narrow))[: block.size]
    flat: Array = block.reshape(-1).astype(narrow, copy=False) ^ marks
    least = flat[1:] ^ flat[:-1]
    room = np.empty_like(least)
    for by in range(2, topk):
        xored = np.bitwise_xor(flat[by:], flat[:-by], out=room[: 1 - by])
        np.minimum(least[: 1 - by], xored, out=least[: 1 - by])
    return bool(least.min() == 0)


@functools.lru_cache(maxsize=4)
def _marks(topk: int, length: int, dtype: np.dtype[Any]) -> Array:
    """Return for each flat id the highest bit if its token-layer has an odd number, else 0."""
    odd = np.repeat(np.array([0, 1 << 8 * dtype.itemsize - 1], dtype), topk)
    return np.resize(odd, length)
