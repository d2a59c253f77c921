"""Ranks that are threads of this process, in the place of process groups, for `collect` and `exchange`.

A rank's number in the job isn't its place in a group, as in a job of several replicas.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from threading import Barrier
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from npu_replay.parallel import collect as collecting


class Group:
    """What the ranks of a group say and send."""

    def __init__(self, *ranks: int) -> None:
        self.ranks = ranks
        self.said = [None] * len(ranks)
        self.barrier = Barrier(len(ranks), timeout=20)
        self.sent: dict[tuple[int, int], Queue[torch.Tensor]] = defaultdict(Queue)


class Rank:
    """A group as one of its ranks knows it."""

    device = torch.device("cpu")
    patience = 0.0

    def __init__(self, group: Group, me: int) -> None:
        self.of = group
        self.me = group.ranks.index(me)
        self.ranks = group.ranks
        self.group = self

    def gather(self, message: Any) -> list[Any]:
        self.of.said[self.me] = message
        self.of.barrier.wait()
        heard = list(self.of.said)
        self.of.barrier.wait()
        return heard

    def tell(self, error: Exception | None, say: object) -> tuple[Exception | None, list[Any]]:
        heard = self.gather((error, say))
        return error or next(filter(None, (raised for raised, _ in heard)), None), [say for _, say in heard]

    def run(self, start: Callable[[], Any]) -> None:
        start()


def _take(tensor: torch.Tensor, sent: torch.Tensor) -> None:
    assert tensor.shape == sent.shape
    tensor.copy_(sent)


def _broadcast(tensor: torch.Tensor, source: int, group: Rank, async_op: bool) -> None:
    _take(tensor, group.gather(tensor.clone())[group.ranks.index(source)])


def _isend(tensor: torch.Tensor, target: int, group: Rank) -> None:
    assert target != group.ranks[group.me]
    group.of.sent[group.me, group.ranks.index(target)].put(tensor.clone())


def _irecv(tensor: torch.Tensor, source: int, group: Rank) -> None:
    _take(tensor, group.of.sent[group.ranks.index(source), group.me].get(timeout=20))


def of_each(work: Callable[[int], Any], ranks: int) -> list[Any]:
    """What each of so many ranks returns."""
    simulated = SimpleNamespace(
        broadcast=_broadcast, isend=_isend, irecv=_irecv, P2POp=lambda start, *arguments: (start, *arguments)
    )
    with (
        mock.patch.object(collecting, "dist", simulated),
        mock.patch.object(collecting, "RankGroup", lambda group, *_: group),
        mock.patch.object(collecting, "_process_groups", list),
        mock.patch.object(collecting, "_begin", lambda message: message[0](*message[1:])),
        ThreadPoolExecutor(ranks) as pool,
    ):
        return list(pool.map(work, range(ranks)))
