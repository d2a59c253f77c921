"""What can be wrong with an array of expert ids, looked for in blocks that stay in the processor's cache.

Each rule stands here once, for the door, for files, bytes and folders, and for RoutedExperts itself: they get
the places that break it, and word the error.
"""

from __future__ import annotations

import functools
import math
from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = "np.ndarray[Any, Any]"

MAX_EXPERTS = 32_767  # int16
MAX_LAYERS = 4_096
"""Of a model: some ten times those of the deepest. More are a number of something else."""
CONSTANT_ROWS = 64
"""From this many rows on, a layer that is the same in all of them may be a fault."""
SURE_BITS = 96
"""So much choice there must be before tokens that choose alike are called a fault: by chance they do once in
2**96 times."""

_MOST_SHIFTS = 64  # a top-k above is sorted: each shift costs a pass, and a mask that is kept
_BLOCK = 1 << 17  # ids; the fastest of 2**14 to 2**20, for ids of one byte and of two


@functools.lru_cache(maxsize=16)
def choice(num_experts: int, topk: int) -> float:
    """How much choice a token has in a layer, in bits."""
    return math.log2(math.comb(num_experts, topk))


def holds(dtype: np.dtype[Any], num_experts: int) -> bool:
    """Can it hold every expert? An id that was cut off on the way is a wrong one that no other check sees."""
    return bool(np.iinfo(dtype).max >= num_experts - 1)


def outside(ids: Array, num_experts: int, recorded: Array) -> Array:
    """The ids that are no expert's.

    Args:
        ids: [tokens, layers, topk].
        num_experts: of a layer.
        recorded: [tokens] bool; other rows aren't looked at.

    Returns:
        [n, 3] int64, the row, the column and the slot of each, in order.
    """
    found = [np.empty((0, 3), np.int64)]
    if ids.size == 0:
        return found[0]
    unsigned = ids.view(
        ids.dtype.str.replace("i", "u")
    )  # where an id below 0 is a large one: one look at each
    step = max(1, _BLOCK // ids[0].size)
    for first in range(0, len(ids), step):
        block = unsigned[first : first + step]
        if block.max() < num_experts:
            continue
        wrong = block >= num_experts
        wrong &= recorded[first : first + step, None, None]
        found.append(np.argwhere(wrong) + np.array([first, 0, 0]))
    return np.concatenate(found)


def named_twice(ids: Array, recorded: Array) -> Array:
    """The token-layers that name an expert twice.

    Args:
        ids: [tokens, layers, topk].
        recorded: [tokens] bool; other rows aren't looked at.

    Returns:
        [n, 2] int64, the row and the column of each, in order.
    """
    tokens, layers, topk = ids.shape
    if ids.size == 0 or topk == 1:
        return np.empty((0, 2), np.int64)
    found = [np.empty((0, 2), np.int64)]
    step = max(1, _BLOCK // (layers * topk))
    for first in range(0, tokens, step):
        block = ids[first : first + step]
        if topk > _MOST_SHIFTS or _any_twice(np.ascontiguousarray(block)):
            rows = np.flatnonzero(recorded[first : first + step])
            ordered = np.sort(block[rows], axis=2)
            at = np.argwhere((ordered[..., 1:] == ordered[..., :-1]).any(axis=2))
            found.append(np.stack([first + rows[at[:, 0]], at[:, 1]], axis=1))
    return np.concatenate(found)


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


def constant_columns(ids: Array) -> Array:
    """The columns in which all rows are the same, [n] int64.

    Args:
        ids: [tokens, layers, topk].
    """
    if ids.size == 0:
        return np.empty(0, np.int64)
    suspects = np.flatnonzero((ids[0] == ids[-1]).all(axis=1))
    step = max(1, _BLOCK // ids[0].size)
    for first in range(0, len(ids), step):
        if not len(suspects):
            break
        block = ids[first : first + step]
        suspects = suspects[(block[:, suspects] == ids[0, suspects]).all(axis=(0, 2))]
    return suspects


def constant_layers(ids: Array, recorded: Array, num_experts: int, tokens: Array | None = None) -> Array:
    """The columns in which all rows are the same and shouldn't be, [n] int64: engines fail so in silence.

    Different tokens choose differently. Where there are so few rows, different tokens or experts that they
    may choose alike, there is none: a model that says one thing for thousands of tokens may send them all to
    the same experts.

    Args:
        ids: [tokens, layers, topk].
        recorded: [tokens] bool; other rows aren't looked at.
        num_experts: of a layer.
        tokens: [tokens], their ids, or more; None takes every one for another.
    """
    at = np.flatnonzero(recorded)
    if len(at) < CONSTANT_ROWS or not (ids[at[0]] == ids[at[-1]]).all(axis=1).any():
        return np.empty(0, np.int64)
    columns = constant_columns(ids if len(at) == len(ids) else ids[at])
    different = len(at) if tokens is None else len(np.unique(tokens[at]))
    sure = (different - 1) * choice(num_experts, ids.shape[2]) >= SURE_BITS
    return columns if sure else columns[:0]


def blank_rows(ids: Array) -> Array:
    """The rows that are zero throughout, [n] int64.

    Args:
        ids: [tokens, layers, topk].
    """
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
    earlier, later = _alike(flat)
    apart = tokens[earlier] != tokens[later]
    earlier, later = earlier[apart], later[apart]
    return np.sort(later[(flat[later] == flat[earlier]).all(axis=1)])


def _alike(flat: Array) -> tuple[Array, Array]:
    """Pairs of rows of bytes that may be equal, the earlier and the later of each: a number that equal rows
    share is the upper half of what is sorted, the row is the lower. Few arrays here are as long as the
    tokens: an engine's arrays are large, and this comes on top of them."""
    word = next(size for size in (8, 4, 2, 1) if flat.shape[1] % size == 0)
    words = flat.view(f"u{word}")
    weights = np.random.default_rng(0).integers(0, 2**63, words.shape[1], dtype=np.uint64) * 2 + 1
    upper, half = np.uint64(0xFFFF_FFFF_0000_0000), np.uint64(0xFFFF_FFFF)
    keys = np.arange(len(flat), dtype=np.uint64)
    step = max(1, _BLOCK // flat.shape[1])
    for first in range(0, len(flat), step):
        keys[first : first + step] |= (words[first : first + step] @ weights) & upper
    keys.sort()
    found = [np.empty(0, np.int64)]
    for first in range(0, len(keys) - 1, step):
        some = keys[first : first + step + 1]
        found.append(first + np.flatnonzero((some[1:] ^ some[:-1]) <= half))
    at = np.concatenate(found)
    return (keys[at] & half).astype(np.int64), (keys[at + 1] & half).astype(np.int64)
