"""Define how a command ends: its exit code, and how it reports an error."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence

from npu_replay import screen
from npu_replay.errors import ReplayError, cures
from npu_replay.options import WrongOption, message
from npu_replay.tables import print_json, show

FAULT = 1
WRONG = 2
INTERRUPTED = 130
CLOSED_PIPE = 141
"""Exit codes, as in docs/cli.md; the last two are a shell's for the signals SIGINT and SIGPIPE."""


def ended(work: Callable[[], int | None], arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; print errors that a user can fix as one message.

    In `arguments`, --json and --debug also count where the command line can't be parsed.
    """
    hints: list[str] = []
    try:
        try:
            return work() or 0
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`, say) has closed the pipe; Python's flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED_PIPE
    except WrongOption as error:
        words = message(error)
        code = WRONG
    except ReplayError as error:
        if "--debug" in arguments:
            raise
        words = message(error)
        hints = [cures(), "--debug shows where it came from"]
        code = FAULT
    show([f"Error: {words}", *hints], to=screen.err())
    if "--json" in arguments:
        print_json(json.dumps({"error": words}, indent=1))
    return code
