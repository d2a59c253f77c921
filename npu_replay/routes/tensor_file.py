"""The arrays of a safetensors file, read into memory of our own.

A memory map shows what the file holds at the moment: whoever writes to it later changes ids that were held
against their checksum before, and where it has shrunk the process dies of a signal.
"""

from __future__ import annotations

import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from npu_replay import json_text
from npu_replay.routes.checks import Array

UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, MemoryError)
"""What reading a file of somebody else's may raise."""

_DTYPES: dict[str, np.dtype[Any]] = {"U8": np.dtype("u1"), "I16": np.dtype("<i2"), "BOOL": np.dtype("bool")}
_LONGEST_HEADER = 100_000_000  # that of the safetensors package


@dataclass(frozen=True)
class _Place:
    """Where an array lies in the file, and what it is."""

    dtype: str
    shape: tuple[int, ...]
    first: int
    end: int


class TensorFile:
    """A safetensors file, whose header is read now and whose arrays are read when they are asked for.

    Raises:
        OSError, ValueError and others of `UNREADABLE`: it isn't one, or not a whole one.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with plain_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int(_exactly(file, 8).view("<u8")[0])
            if length > min(size - 8, _LONGEST_HEADER):
                raise ValueError("its header is cut short, or it isn't a safetensors file")
            header = json_text.parse(_exactly(file, length).tobytes())
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        if not all(isinstance(value, str) for value in self.metadata.values()):
            raise ValueError("its metadata aren't text")
        self._places = {name: _place(said, 8 + length) for name, said in header.items()}
        at = 8 + length
        for place in sorted(self._places.values(), key=lambda place: (place.first, place.end)):
            if place.first != at:
                raise ValueError("its tensors overlap, or leave holes")
            at = place.end
        if at != size:
            raise ValueError(f"it is {size} bytes long, and its header says {at}")

    def arrays(self, *names: str) -> Iterator[Array]:
        """These arrays, each in memory of its own.

        Raises:
            KeyError and others of `UNREADABLE`: there is none of that name, or the file has shrunk.
        """
        with plain_file(self.path) as file:
            for name in names:
                place = self._places[name]
                if place.dtype not in _DTYPES:
                    raise ValueError(f"{name} is of dtype {place.dtype}")
                file.seek(place.first)
                found = _exactly(file, place.end - place.first)
                if place.dtype == "BOOL" and found.size and int(found.max()) > 1:
                    raise ValueError(f"{name} isn't a mask")
                yield found.view(_DTYPES[place.dtype]).reshape(place.shape)


def _place(said: dict[str, Any], start: int) -> _Place:
    dtype, shape, (first, end) = said["dtype"], said["shape"], said["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, first, end)) or end < first:
        raise ValueError(f"a tensor with shape {shape} at {first} to {end}")
    if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype].itemsize != end - first:
        raise ValueError(f"{end - first} bytes for a tensor of shape {shape}")
    return _Place(str(dtype), tuple(shape), start + first, start + end)


@contextmanager
def plain_file(path: Path) -> Iterator[BinaryIO]:
    """A file to be read; nobody waits for the other end of a pipe.

    Raises:
        OSError, ValueError: it can't be opened, or is something else.
    """

    def now(name: str, flags: int) -> int:
        return os.open(name, flags | getattr(os, "O_NONBLOCK", 0))

    with open(path, "rb", buffering=0, opener=now) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is no plain file")
        yield file


def _exactly(file: BinaryIO, size: int) -> Array:
    """So many bytes from here on, in memory of our own."""
    found = np.empty(size, np.uint8)
    there = 0
    while there < size and (read := file.readinto(found[there:].data)):  # type: ignore[attr-defined]
        there += read
    if there < size:
        raise ValueError(f"it ends {size - there} bytes early: it was cut short, or somebody writes to it")
    return found
