"""How a command ends."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from npu_replay.errors import ReplayError, cures
from npu_replay.options import WrongOption, message
from npu_replay.tables import show_error

FAULT, WRONG, INTERRUPTED, CLOSED_PIPE = 1, 2, 130, 141
"""Exit codes, as docs/cli.md has them; the last two are a shell's for the signals SIGINT and SIGPIPE."""


def exit_code(error: Exception) -> int:
    """Of a command that ended in this error."""
    return WRONG if isinstance(error, WrongOption) else FAULT


def failed(error: Exception, *hints: str, as_json: bool) -> None:
    """Say what a command ended in, and where more of it stands."""
    if isinstance(error, WrongOption):
        show_error(message(error), as_json=as_json)
    elif isinstance(error, ReplayError):
        show_error(message(error), cures(), *hints, as_json=as_json)
    else:
        doctor = "npu-replay doctor says what is missing, and how to get it"
        show_error(str(error), doctor, as_json=as_json)


def leave_pipe() -> NoReturn:
    """End as a program does whose reader has gone, such as `head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end
    raise SystemExit(CLOSED_PIPE)
