"""The commands of npu-replay in this process: what a command line prints, and how it ends."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass

import pytest

from npu_replay.cli import main


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    exception: SystemExit
    stdout: str
    stderr: str

    @property
    def exit_code(self) -> int:
        return int(self.exception.code or 0)

    @property
    def output(self) -> str:
        """All that it printed."""
        return self.stdout + self.stderr


def invoke(*arguments: object) -> Result:
    """Run a command; an error that it doesn't turn into a message comes out."""
    out = io.StringIO()
    err = io.StringIO()
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with streams[0], streams[1], pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return Result(ended.value, out.getvalue(), err.getvalue())
