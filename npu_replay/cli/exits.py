"""How a command ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from npu_replay.options import WrongOption

FAULT, WRONG, INTERRUPTED, CLOSED_PIPE = 1, 2, 130, 141
"""Exit codes, as docs/cli.md has them; the last two are a shell's for the signals SIGINT and SIGPIPE."""


def exit_code(error: Exception) -> int:
    """Of a command that ended in this error."""
    return WRONG if isinstance(error, WrongOption) else FAULT


def leave_pipe() -> NoReturn:
    """End as a program does whose reader has gone, such as `head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
    raise SystemExit(CLOSED_PIPE)
