"""Lines that an operator has to see, in a process that shows warnings only."""

from __future__ import annotations

import logging
import sys

_log = logging.getLogger("npu_replay.job")


def announce(line: str) -> None:
    """Log one line at INFO, and have it shown where nobody has set logging up for it."""
    if not _log.isEnabledFor(logging.INFO):
        _log.setLevel(logging.INFO)
    if not _shown(_log):
        _log.addHandler(_Stderr())
    _log.info("[npu_replay] %s", line)


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what stderr is at that time."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def _shown(logger: logging.Logger | None) -> bool:
    """Does any handler show what this logger says at INFO?"""
    while logger is not None:
        if any(handler.level <= logging.INFO for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False
