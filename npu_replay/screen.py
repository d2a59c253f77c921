"""Where commands print, while what torch, Megatron-core and transformers print goes to a log.

They warn by `warnings`, by loggers that keep the stderr of their import, by print, and from C++. All of that
ends in the file descriptors 1 and 2, so these are what is turned aside.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

_kept: dict[str, TextIO] = {}
"""Of stdout and stderr, while they are turned aside, what the user sees."""


def out() -> TextIO:
    """Return stdout, as the user sees it."""
    return _kept.get("stdout", sys.stdout)


def err() -> TextIO:
    """Return stderr, as the user sees it."""
    return _kept.get("stderr", sys.stderr)


@contextlib.contextmanager
def quiet(name: str, log: Path | None = None, *, told: bool = True) -> Iterator[Path]:
    """Open a block in which only `out` and `err` reach the user; it gives the log that takes the rest.

    Args:
        name: of the command.
        log: none: a new file in the temporary folder. It is removed if it stays empty.
        told: name the log on stderr. First, since a crash in C++ leaves no time for it.
    """
    if log is None:
        descriptor, place = tempfile.mkstemp(prefix=f"npu-replay-{name}-", suffix=".log")
        os.close(descriptor)
        log = Path(place)
    with log.open("w", buffering=1, encoding="utf-8") as file, contextlib.ExitStack() as stack:
        if told:
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
            stream.flush()  # what others wrote to it meanwhile
            os.dup2(kept.fileno(), descriptor)


def progress(count: int) -> Callable[[str], None]:
    """Return a function that says on stderr which of `count` parts begins; call it with the part's title."""
    numbers = itertools.count(1)

    def tell(title: str) -> None:
        err().write(f"{next(numbers)}/{count} {title}\n")
        err().flush()

    return tell
