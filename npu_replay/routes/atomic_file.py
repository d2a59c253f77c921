"""Writes files whole or not at all, and reads them only if they are plain files."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

import numpy as np

from npu_replay.errors import RouteFileError
from npu_replay.routes.checks import Array


def plain_file(path: Path) -> BufferedReader:
    """Open a plain file to read; raise ValueError for a pipe or a device, which may never end."""
    if path.exists() and not path.is_file():
        raise ValueError("it is no plain file")
    return path.open("rb")


def reader(file: BufferedReader) -> tuple[Callable[[int, int], Array], int]:
    """Return a function that reads the bytes between two places into new memory, and the file's size."""

    # No memory map: that follows later writes, so ids could change after their checksum was verified, and a
    # file that shrinks would kill the process with a signal.
    def read(first: int, end: int) -> Array:
        buffer = np.empty(end - first, np.uint8)
        file.seek(first)
        there = file.readinto(buffer.data)
        if there < len(buffer):
            raise ValueError(f"it ends {len(buffer) - there} bytes early: somebody writes to it")
        return buffer

    return read, os.fstat(file.fileno()).st_size


def write_whole(path: Path, *parts: bytes | memoryview, overwrite: bool) -> None:
    """Write a file so that nobody sees a part of it. Of several writers that don't overwrite one succeeds.

    >>> write_whole(Path("a.json"), b"{}", overwrite=False)
    >>> Path("a.json").read_bytes()
    b'{}'
    """
    with _scratch(path, overwrite=overwrite) as (scratch, file):
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
        file.close()  # a full disk may fail only here, before the old file is replaced
        if not overwrite:
            try:
                os.link(scratch, path)  # unlike a rename, this fails if another writer was faster
                return
            except FileExistsError as error:
                raise _is_there(path) from error
            except OSError:  # a file system without links
                if path.exists():
                    raise _is_there(path) from None
        os.replace(scratch, path)


def check_place(path: Path, *, overwrite: bool) -> None:
    """Refuse a place before minutes of work if `write_whole` would refuse it afterwards."""
    with _scratch(path, overwrite=overwrite):
        pass


@contextmanager
def _scratch(path: Path, *, overwrite: bool) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield a new file beside `path`, removed at the end; raise an OSError of the block as RouteFileError."""
    # Each writer has a name of its own, so that none waits for another. A killed one leaves its file.
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        if not overwrite and path.exists():  # checked before anything is written
            raise _is_there(path)
        file = scratch.open("xb")  # with the permissions that the umask leaves
        try:
            yield scratch, file
        finally:
            for act in (file.close, scratch.unlink):
                with suppress(OSError):  # the write has failed already, or all data are in place
                    act()
    except OSError as error:  # strerror only: the error may name the scratch file
        raise RouteFileError(f"it can't be written ({error.strerror or error})", where=str(path)) from error


def _is_there(path: Path) -> RouteFileError:
    return RouteFileError(
        "the file is there already and is not overwritten",
        where=str(path),
        cause="an earlier run; to replace it: --force on the command line, overwrite=True in Python",
    )
