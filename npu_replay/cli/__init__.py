"""Defines the entry point of the console."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from npu_replay.cli.commands import run
from npu_replay.cli.exits import ended


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command of `arguments`, or of the process's own arguments."""
    words = sys.argv[1:] if arguments is None else arguments
    raise SystemExit(ended(lambda: run(words), words))
