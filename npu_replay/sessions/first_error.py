"""Raise the errors of a block at once, or keep the first of them until the block is left."""

from __future__ import annotations

import logging
from typing import Any

from npu_replay.errors import ReplayError

logger = logging.getLogger(__name__)


class FirstError:
    """Raises the errors of a block at once, or keeps the first of them until it is left.

    with first_error:
        check()
    """

    def __init__(self, *, wait: bool) -> None:
        self._wait = wait
        self.first: ReplayError | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if not self._wait or not isinstance(error, ReplayError):
            return False
        self.keep(error)
        return True

    def keep(self, error: ReplayError) -> None:
        """Keep this error, unless an earlier one is kept."""
        if self.first is None:
            self.first = error
            # Logged at once, since another error before the end of the block would hide it.
            logger.error("[npu_replay] %s; the pass goes on, and stops at its end", error.line)
