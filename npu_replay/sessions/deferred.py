"""Errors of one rank wait for the end of the block, where all ranks can leave together.

A rank that raises in the middle of a schedule leaves the others in a collective until its timeout, half an
hour later and without a word. So a block on many ranks goes on after an error with the routers' own choices,
and raises when the schedule is over: before an optimizer steps, and where the ranks can tell each other.
"""

from __future__ import annotations

import logging

import torch

from npu_replay.errors import ReplayError
from npu_replay.routers import Router
from npu_replay.sessions.session import Session, _Running
from npu_replay.sessions.stepwise import Feed, Tap

logger = logging.getLogger(__name__)


class Deferring(Session):
    """Keeps its first error until the block is left."""

    failed: ReplayError | None = None

    def defer(self, error: ReplayError) -> None:
        """Raise this when the block is left, if nothing else went wrong before."""
        if self.failed is None:
            self.failed = error
            # At once: what else goes wrong before the block is left would hide it.
            logger.error("[npu_replay] %s; the pass goes on, and stops at its end", error.line)

    def _begin(self, chunk: int) -> None:
        try:
            super()._begin(chunk)
        except ReplayError as error:
            self.defer(error)

    def _end(self, chunk: int, output: object) -> None:
        try:
            super()._end(chunk, output)
        except ReplayError as error:
            self.defer(error)

    def _arm(self, router: Router, chunk: int, hidden: torch.Tensor) -> _Running | None:
        try:
            return super()._arm(router, chunk, hidden)
        except ReplayError as error:
            self.defer(error)
            return None

    def _disarm(self, router: Router, chunk: int, running: _Running, output: object) -> object:
        try:
            return super()._disarm(router, chunk, running, output)
        except ReplayError as error:
            self.defer(error)
            return None

    def _check_complete(self) -> None:
        if self.failed is not None:
            raise self.failed
        super()._check_complete()


class DeferringFeed(Deferring, Feed):
    """A Feed whose errors wait."""


class DeferringTap(Deferring, Tap):
    """A Tap whose errors wait."""
