"""Reads arrays from outside: base64, .npy, nested lists. No pickle is ever loaded."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import torch

from npu_replay.errors import InvalidRoutes, quoted
from npu_replay.rollout.release_rules import Source, Symptom
from npu_replay.routes.checks import MAX_EXPERTS, Array, is_ids
from npu_replay.routes.fingerprint import as_token_ids

TokenIds: TypeAlias = "Sequence[int] | Array | torch.Tensor"

_IDS = "integers, [tokens, layers, topk]"
_NO_IDS = "this isn't an array of expert ids"
_WIDEST = 4  # bytes per id: int32
_BLOCK = 1 << 13  # three ids each, which stay in the processor's cache
_PAIRS = ((0, 1), (2, 3, 4), (5, 6, 7))  # of characters, that have the bits of each of three ids
_PAIRS_OF_BYTES = ((0,), (2, 3), (5,))  # the same for ids below 256, where the other pairs are «AA»
_ZEROS = np.frombuffer(b"\0\0AA\0\0\0\0AA\0\0AAAA" * _BLOCK, "<u8")
_UPPER_BYTES = np.where(_ZEROS.view(np.uint8) > 0, 0xFF, 0).astype(np.uint8).view("<u8")


def token_ids(value: Any, source: Source) -> Array:
    """Return token ids, integers from 0 on, as [tokens] int64; refuse anything else."""
    ids = as_token_ids(value)
    if ids is not None and not (ids < 0).any():
        return ids
    raise source.unreadable(
        "these aren't token ids",
        "integers from 0 on, [tokens]",
        quoted(value) if ids is None else f"{ids.min()} to {ids.max()}",
    )


def as_numpy(value: Any) -> Any:
    """Return a tensor as an array, if numpy can hold it; anything else unchanged."""
    if isinstance(value, torch.Tensor):
        with suppress(TypeError, RuntimeError):  # sparse, quantised, or of a dtype that numpy lacks: no ids
            return value.detach().cpu().numpy()
    return value


def any_array(value: Any, *, source: Source) -> Array:
    """Read routes that say their own shape: an array, a tensor, base64 of an .npy, nested lists."""
    value = as_numpy(value)
    if isinstance(value, (str, bytes, bytearray)):
        return from_npy(from_base64(value, source=source), source=source)
    if isinstance(value, list):
        return from_lists(value, source=source)
    if is_ids(value):
        return value
    raise not_ids(source, value, f"{_IDS}: an array, base64 of an .npy, or nested lists")


def not_ids(source: Source, got: Any, expected: str = _IDS) -> InvalidRoutes:
    """Make an error about something that holds no ids, or not in three axes."""
    return source.error(Symptom.SHAPE, _NO_IDS, expected, quoted(got))


def from_base64(text: str | bytes | bytearray, *, source: Source) -> bytes:
    """Decode base64; raise InvalidRoutes for something else."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise source.unreadable("this isn't base64", "base64 without line ends", error) from error


def ids_from_base64(text: str | bytes, *, source: Source) -> Array:
    """Decode base64 of int32 ids, flat; raise InvalidRoutes for something else."""
    ids = _small_ids(text)
    if ids is not None:
        return ids
    data = from_base64(text, source=source)
    if len(data) % _WIDEST:
        raise source.unreadable("these aren't int32", "a multiple of 4 bytes", len(data))
    return np.frombuffer(data, "<i4")


def _small_ids(text: str | bytes) -> Array | None:
    """Decode base64 of int32 ids from 0 to 32,767 as uint16; None if it holds anything else."""
    # Three ids are 16 characters, so each of their eight pairs always has the same bits of the same id. Half
    # of the pairs are «AA» where ids fit into a byte, which one comparison shows: they aren't looked up. It
    # takes a third of the time of binascii, which reads one character at a time.
    if not text.isascii():
        return None
    tables = _bits_of_pairs()
    whole = len(text) // 16
    ids = np.empty((whole, 3), np.uint16)
    for first in range(0, whole, _BLOCK):
        some = text[16 * first : 16 * min(whole, first + _BLOCK)]
        words = np.frombuffer(some.encode() if isinstance(some, str) else some, "<u8")
        narrow = bool((words & _UPPER_BYTES[: len(words)] == _ZEROS[: len(words)]).all())
        pairs = words.view("<u2").reshape(-1, 8)
        for place, own in enumerate(_PAIRS_OF_BYTES if narrow else _PAIRS):
            bits = (tables[pair].take(pairs[:, pair]) for pair in own)
            ids[first : first + _BLOCK, place] = functools.reduce(np.bitwise_or, bits)
    try:
        rest = np.frombuffer(base64.b64decode(text[16 * whole :], validate=True), "<i4")
    except ValueError:
        return None
    if ids.max(initial=0) > MAX_EXPERTS or rest.min(initial=0) < 0 or rest.max(initial=0) > MAX_EXPERTS:
        return None
    return np.concatenate([ids.reshape(-1), rest.astype(np.uint16)]) if len(rest) else ids.reshape(-1)


@functools.cache
def _bits_of_pairs() -> list[Array]:
    """Make for each place of a pair a table of its id's bits; 1 << 15 if no small id has it there."""
    letters = np.frombuffer(base64.b64encode(bytes.fromhex("".join(f"{n:03x}" for n in range(4096)))), "<u2")
    tables = []
    for place in range(8):
        data = b"".join((bits << 84 - 12 * place).to_bytes(12, "big") for bits in range(4096))
        added = np.frombuffer(data, "<u4").reshape(-1, 3).max(axis=1)
        tables.append(np.full(1 << 16, 1 << 15, np.uint16))
        tables[-1][letters] = np.minimum(added, 1 << 15)
    return tables


def from_npy(data: bytes, *, source: Source) -> Array:
    """Read an .npy of integers, [tokens, layers, topk]."""
    file = io.BytesIO(data)
    try:
        rows = np.lib.format.read_array(file, allow_pickle=False)
        if rest := file.read():
            raise ValueError(f"{len(rest)} bytes behind the array")
    except Exception as error:  # numpy parses the header as Python, which may raise anything
        raise source.unreadable("this isn't an .npy array", _IDS, str(error)[:200]) from error
    if is_ids(rows):
        return rows
    raise not_ids(source, rows)


def from_lists(value: list[Any], *, source: Source) -> Array:
    """Read nested lists of integers, [tokens, layers, topk], as int64; a list without rows is [0, 0, 0]."""
    with suppress(ValueError):  # ragged, or too deep
        rows = np.array(value) if value else np.zeros((0, 0, 0), np.int64)
        if is_ids(rows):
            return rows
    raise source.unreadable("these aren't nested lists of expert ids", _IDS, f"a list of {len(value)}")
