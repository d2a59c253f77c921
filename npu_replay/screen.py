"""Separate the output of commands from what torch, Megatron-core and transformers print, which goes to a log.

They use `warnings`, loggers bound to the stderr of their import, print, and C++. All of these write to the
file descriptors 1 and 2, so the descriptors are redirected.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_kept: dict[str, TextIO] = {}
"""The user's stdout and stderr, while they are redirected."""


def out() -> TextIO:
    return _kept.get("stdout", sys.stdout)


def err() -> TextIO:
    return _kept.get("stderr", sys.stderr)


@contextlib.contextmanager
def quiet(name: str, log: Path | None = None, *, name_it: bool = True) -> Iterator[Path]:
    """Open a block in which only `out` and `err` reach the user; it yields the log that takes the rest.

    Without `log` a new file in the temporary folder is used, and removed if it stays empty. With `name_it`
    stderr names the log at the start, since a crash in C++ leaves no time for it.
    """
    if log is None:
        descriptor, place = tempfile.mkstemp(prefix=f"npu-replay-{name}-", suffix=".log")
        os.close(descriptor)
        log = Path(place)
    with log.open("w", buffering=1, encoding="utf-8") as file, contextlib.ExitStack() as stack:
        if name_it:
            err().write(f"Warnings of others go to {log}\n")
        for stream, number in (("stdout", 1), ("stderr", 2)):
            stack.enter_context(_turned(stream, number, file))
        yield log
    if not log.stat().st_size:
        log.unlink()


@contextlib.contextmanager
def _turned(name: str, descriptor: int, log: TextIO) -> Iterator[None]:
    stream: TextIO = getattr(sys, name)
    stream.flush()
    with os.fdopen(os.dup(descriptor), "w", encoding=stream.encoding, errors=stream.errors) as kept:
        os.dup2(log.fileno(), descriptor)
        _kept[name] = kept
        setattr(sys, name, log)
        try:
            yield
        finally:
            setattr(sys, name, stream)
            del _kept[name]
            stream.flush()  # writes what others have printed in the meantime
            os.dup2(kept.fileno(), descriptor)


def tell(title: str) -> None:
    """Report on stderr which part of the work begins."""
    err().write(f"{title}\n")
    err().flush()
