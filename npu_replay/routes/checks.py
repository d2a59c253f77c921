"""Every rule about an array of expert ids, [tokens, layers, topk], once.

An array is read in blocks that stay in the processor's cache. What is wrong is told as a `Finding`, or as the
places; the caller adds whose array it is and the usual cause.
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
"""Of a model: some ten times those of the deepest. More are a number of something else."""
MAX_TOKENS = 1 << 31
CONSTANT_ROWS = 64
"""From this many rows on, a layer that is the same in all of them may be a fault."""
SURE_BITS = 96
"""So much choice there must be before tokens that choose alike are called a fault: by chance they do once in
2**96 times."""
STALE_BITS = 64
"""The same for rows that are another token's, where all pairs of rows that might meet are counted in."""
FIRST_ROWS = 4
"""Those of a sequence's beginning attend to little but the first token, and may choose what it chose: with
random weights, live Mixtrals and DeepSeeks did so in all layers, rightly, in 1 of 1,000 sequences."""

_LOOKED_AT = 16  # copies that are held against all rows
_MOST_SHIFTS = 64  # a top-k above is sorted: each shift costs a pass, and a mask that is kept
_BLOCK = 1 << 17  # ids; the fastest of 2**14 to 2**20, for ids of one byte and of two


@dataclass(frozen=True)
class Finding:
    """What breaks a rule, in the words of an error.

    Attributes:
        problem, expected, got, cause: as in `ReplayError`.
        column: of the first place; None where it is no single one.
    """

    problem: str
    expected: str
    got: object
    column: int | None = None
    cause: str = field(default="", repr=False)

    def layer(self, layers: tuple[int, ...]) -> str:
        """«layer 5», by the labels of the columns."""
        return "" if self.column is None else f"layer {layers[self.column]}"

    def error(self, kind: type[_Error], where: str, cause: str = "") -> _Error:
        """Of this kind, with the caller's cause if he knows a better one."""
        cause = cause or self.cause
        return kind(self.problem, where=where, expected=self.expected, got=self.got, cause=cause)


@functools.lru_cache(maxsize=16)
def choice(num_experts: int, topk: int) -> float:
    """How much choice a token has in a layer, in bits.

    >>> round(choice(128, 8), 1)
    40.4
    """
    return math.log2(math.comb(num_experts, topk))


def tells_apart(layers: int, num_experts: int, topk: int) -> bool:
    """Is there so much choice in all layers together that two tokens never choose alike by chance?"""
    return layers * choice(num_experts, topk) >= SURE_BITS


def is_ids(value: Any) -> TypeGuard[Array]:
    """Is it an array of integers, [tokens, layers, topk]?"""
    return isinstance(value, np.ndarray) and value.ndim == 3 and value.dtype.kind in "iu"


def find_outside(
    ids: Array, num_experts: int, recorded: Array | None = None, first_row: int = 0
) -> Finding | None:
    """An id that is no expert's, or a dtype that can't hold every expert: an id that was cut off on the way
    is a wrong one that no other check sees.

    Args:
        ids: [tokens, layers, topk].
        num_experts: of a layer.
        recorded: [tokens] bool; other rows aren't looked at.
        first_row: what messages call row 0.

    >>> find_outside(np.array([[[0, 1], [2, 8]]]), num_experts=8)
    Finding(problem='an id is out of range, the first in row 0 (1 such token-layers)',
            expected='ids from 0 to 7', got=8, column=1)
    """
    if (most := np.iinfo(ids.dtype).max) < num_experts - 1:
        return Finding(
            "the ids' dtype can't hold every expert", f"0 to {num_experts - 1}", f"{ids.dtype}, 0 to {most}"
        )
    places = outside(ids, num_experts, recorded)
    if not len(places):
        return None
    row, column, slot = places[0].tolist()
    return Finding(
        f"an id is out of range, the first in row {first_row + row} "
        f"({len(np.unique(places[:, :2], axis=0))} such token-layers)",
        f"ids from 0 to {num_experts - 1}",
        int(ids[row, column, slot]),
        column,
    )


def find_twice(ids: Array, recorded: Array, first_row: int = 0) -> Finding | None:
    """An expert that a token-layer names twice; see `find_outside` for the arguments.

    >>> find_twice(np.array([[[0, 1], [2, 2]]]), np.array([True])).got
    [2, 2]
    """
    places = named_twice(ids, recorded)
    if not len(places):
        return None
    row, column = places[0].tolist()
    return Finding(
        f"{len(places)} token-layers name an expert twice, the first in row {first_row + row}",
        f"{ids.shape[2]} different experts a token",
        ids[row, column].tolist(),
        column,
    )


def find_constant(
    ids: Array, recorded: Array, num_experts: int, tokens: Array | None = None, layers: tuple[int, ...] = ()
) -> Finding | None:
    """Find a layer that an engine never captured, among those of `constant_layers`.

    Its column holds zeros, or 0 to k - 1 in order, as a buffer does that nobody wrote into; or no layer
    varies. Any other column, beside layers that vary, is a dead router's: a warning names it by `layers`.
    """
    columns = constant_layers(ids, recorded, num_experts, tokens)
    row = ids[recorded.argmax(), columns] if len(columns) else ids[:0, 0]
    unwritten = (row == 0).all(axis=1) | (row == np.arange(ids.shape[2])).all(axis=1)
    wrong = columns if len(columns) == ids.shape[1] else columns[unwritten]
    if not len(wrong):
        if len(columns) and layers:
            _warn_of_dead_routers(tuple(layers[column] for column in columns))
        return None
    column = int(wrong[0])
    return Finding(
        f"all {int(recorded.sum())} recorded rows are the same ({len(wrong)} such layers)",
        "routes that depend on the token",
        f"{ids[recorded.argmax(), column].tolist()} in every row",
        column,
    )


@functools.cache  # once a process
def _warn_of_dead_routers(layers: tuple[int, ...]) -> None:
    _log.warning(
        "[npu_replay] layer %s sends all tokens to the same experts, and other layers don't: its router has "
        "collapsed or was never trained, or the engine repeats one row there. The rows are used as they are",
        ", ".join(map(str, layers)),
    )


def outside(ids: Array, num_experts: int, recorded: Array | None = None) -> Array:
    """The ids that are no expert's: [n, 3] int64, the row, the column and the slot of each, in order."""
    found = [np.empty((0, 3), np.int64)]
    unsigned = ids.view(ids.dtype.str.replace("i", "u"))  # an id below 0 is a large one: one look at each
    for first, block in _blocks(unsigned):
        if block.max() < num_experts:
            continue
        wrong = block >= num_experts
        if recorded is not None:
            wrong &= recorded[first : first + len(block), None, None]
        found.append(np.argwhere(wrong) + np.array([first, 0, 0]))
    return np.concatenate(found)


def named_twice(ids: Array, recorded: Array) -> Array:
    """The recorded token-layers that name an expert twice: [n, 2] int64, row and column, in order."""
    topk = ids.shape[2]
    found = [np.empty((0, 2), np.int64)]
    for first, block in _blocks(ids) if topk > 1 else ():
        if topk > _MOST_SHIFTS or _any_twice(np.ascontiguousarray(block)):
            rows = np.flatnonzero(recorded[first : first + len(block)])
            ordered = np.sort(block[rows], axis=2)
            at = np.argwhere((ordered[..., 1:] == ordered[..., :-1]).any(axis=2))
            found.append(np.stack([first + rows[at[:, 0]], at[:, 1]], axis=1))
    return np.concatenate(found)


def constant_layers(ids: Array, recorded: Array, num_experts: int, tokens: Array | None = None) -> Array:
    """The columns in which all rows are the same and shouldn't be, [n] int64: engines fail so in silence.

    Different tokens choose differently. Where there are so few rows, different tokens or experts that they
    may choose alike, there is none: a model that says one thing for thousands of tokens may send them all to
    the same experts. So may a router with favourites, as the other layers show: those of a Llama 4 with
    random weights send 94 % of all tokens to one of 16.

    Args:
        ids: [tokens, layers, topk].
        recorded: [tokens] bool; other rows aren't looked at.
        num_experts: of a layer.
        tokens: [tokens], their ids, or more; None takes every one for another.
    """
    at = np.flatnonzero(recorded)
    if len(at) < CONSTANT_ROWS or not (ids[at[0]] == ids[at[-1]]).all(axis=1).any():
        return np.empty(0, np.int64)
    known = ids if len(at) == len(ids) else ids[at]
    columns = constant_columns(known)
    different = len(at) if tokens is None else len(np.unique(tokens[at]))
    each = choice(num_experts, ids.shape[2])
    if 0 < len(columns) < ids.shape[1]:  # where other layers have favourites, this one may have one alone
        others = np.delete(known, columns, axis=1)
        favourites = _neighbours_alike(others, np.ones(len(at) - 1, bool)).max()
        each = min(each, -math.log2(max(favourites, 2.0**-each)) / 2)
    return columns if (different - 1) * each >= SURE_BITS else columns[:0]


def constant_columns(ids: Array) -> Array:
    """The columns in which all rows are the same, [n] int64; none where there are no rows."""
    if ids.size == 0:
        return np.empty(0, np.int64)
    suspects = np.flatnonzero((ids[0] == ids[-1]).all(axis=1))
    for _, block in _blocks(ids):
        if not len(suspects):
            break
        suspects = suspects[(block[:, suspects] == ids[0, suspects]).all(axis=(0, 2))]
    return suspects


def blank_rows(ids: Array) -> Array:
    """The rows that are zero throughout, [n] int64."""
    if ids.size == 0:
        return np.empty(0, np.int64)
    suspects = np.flatnonzero(~ids[:, 0].any(axis=1))
    return suspects[~ids[suspects].any(axis=(1, 2))]


def repeated_rows(ids: Array, tokens: Array) -> Array:
    """The rows that are the same as an earlier one throughout, the nearest of which is another token's,
    [n] int64.

    Args:
        ids: [tokens, layers, topk].
        tokens: [tokens], integers.
    """
    if len(ids) < 2 or ids.size == 0:
        return np.empty(0, np.int64)
    flat = np.ascontiguousarray(ids).reshape(len(ids), -1).view(np.uint8)
    rows, others = _alike(flat)
    apart = tokens[rows] != tokens[others]
    rows, others = rows[apart], others[apart]
    return np.sort(rows[(flat[rows] == flat[others]).all(axis=1)])


def stale_rows(ids: Array, tokens: Array, num_experts: int) -> Array:
    """The rows that `repeated_rows` finds, where so many among so many are no chance.

    Tokens that are alike (digits, blanks) make copies, too, but more rows that are nearly copies: a fault
    makes none of these.
    """
    if not tells_apart(ids.shape[1], num_experts, ids.shape[2]):
        return np.empty(0, np.int64)
    rows = repeated_rows(ids, tokens)
    if not len(rows):
        return rows
    each = _bits(ids, tokens, num_experts, rows) - 2 * math.log2(len(ids))  # any two rows may meet
    sure = len(rows) * each >= STALE_BITS and _near_copies(ids, tokens, rows[:_LOOKED_AT]) < len(rows)
    return rows if sure else rows[:0]


def _near_copies(ids: Array, tokens: Array, rows: Array) -> int:
    """How many rows are the same as another token's of `rows` but for an eighth of the layers."""
    layers = ids.shape[1]
    near = np.zeros(len(ids), bool)
    for row in rows:
        alike = (ids == ids[row]).all(axis=2).sum(axis=1)
        near |= (
            (alike < layers) & (alike >= layers - max(1, layers // 8)) & (tokens[: len(ids)] != tokens[row])
        )
    return int(near.sum())


def _bits(ids: Array, tokens: Array, num_experts: int, but: Array) -> float:
    """How much choice a token has in all layers, by how often those that follow each other choose alike.

    Args:
        but: rows that aren't looked at.
    """
    others = np.ones(len(ids), bool)
    others[but] = False
    apart = tokens[1 : len(ids)] != tokens[: len(ids) - 1]
    alike = _neighbours_alike(ids, others[1:] & others[:-1] & apart)
    return float(-np.log2(np.maximum(alike, 2.0 ** -choice(num_experts, ids.shape[2]))).sum())


def _neighbours_alike(ids: Array, pairs: Array) -> Array:
    """How often two rows that follow each other are the same, by column, of the `pairs` that count."""
    rows = np.flatnonzero(pairs)
    counts: Array = (ids[rows + 1] == ids[rows]).all(axis=2).sum(axis=0)
    return counts / max(1, len(rows))


def _blocks(ids: Array) -> Iterator[tuple[int, Array]]:
    """Some rows at a time, and the number of the first; nothing of an array without ids."""
    step = max(1, _BLOCK // ids[0].size) if ids.size else 1
    for first in range(0, len(ids) if ids.size else 0, step):
        yield first, ids[first : first + step]


def _any_twice(block: Array) -> bool:
    """Does any token-layer name an expert twice? The flat ids are held against themselves, shifted by 1 to
    topk - 1 places: that compares the ids of neighbours too, which a mask takes out again."""
    topk = block.shape[-1]
    flat = block.reshape(-1)
    equal = np.empty(len(flat), bool)
    for shift, same_row in enumerate(_masks(topk, max(_BLOCK, len(flat))), start=1):
        there = equal[: len(flat) - shift]
        np.equal(flat[shift:], flat[:-shift], out=there)
        np.logical_and(there, same_row[: len(there)], out=there)
        if there.any():
            return True
    return False


@functools.lru_cache(maxsize=4)
def _masks(topk: int, length: int) -> list[Array]:
    """For each shift: is a flat id's token-layer that of the one `shift` places on, too?"""
    place = np.resize(np.arange(topk, dtype=np.uint16), length)
    return [place < topk - shift for shift in range(1, topk)]


def _alike(flat: Array) -> tuple[Array, Array]:
    """Pairs of rows of bytes that may be equal, and of each the nearest earlier one: a number that equal rows
    share is the upper half of what is sorted, the row is the lower."""
    word = next(size for size in (8, 4, 2, 1) if flat.shape[1] % size == 0)
    weights = np.random.default_rng(0).integers(0, 2**63, flat.shape[1] // word, dtype=np.uint64) * 2 + 1
    upper, half = np.uint64(0xFFFF_FFFF_0000_0000), np.uint64(0xFFFF_FFFF)
    keys = np.arange(len(flat), dtype=np.uint64)
    for first, block in _blocks(flat):
        keys[first : first + len(block)] |= (block.view(f"u{word}") @ weights) & upper
    keys.sort()
    at = np.flatnonzero((keys[1:] ^ keys[:-1]) <= half)
    return (keys[at + 1] & half).astype(np.int64), (keys[at] & half).astype(np.int64)
