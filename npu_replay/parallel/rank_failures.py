"""Finds ranks that are missing or failed, and makes all ranks of a group leave together.

Without an error one collective is enough. If a rank fails or is late, the ranks use the store through which
they met: each living rank signs there, with its error if it has one, and only ranks that don't sign are
named. gloo can't tell: a rank that leaves closes its connections, and looks like a dead one.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from npu_replay.errors import ReplayError, as_text

PATIENCE = 300.0
"""Seconds. Ranks reach a job's first pass together, except for loading weights and first kernels."""

_TAG = 0x6E7075
"""Not 0: the job's own messages may be under way in this group."""

_FAILED = "a rank that failed before (see its log)"
_T = TypeVar("_T")

_calls = 0


class RankError(ReplayError):
    """Says that other ranks are missing or failed, so this one stops too. Its text is passed on unchanged."""


class _Broken(Exception):
    """Says that a collective failed, or took too long."""


class RankGroup:
    """Passes errors between the ranks of one process group, which may be `patience` seconds apart."""

    def __init__(self, group: Any, patience: float, problem: str, cause: str) -> None:
        self.group = group
        self.patience = patience
        self._problem = problem
        self._cause = cause
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.me: int = dist.get_rank(group)
        kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
        self.device = torch.device("cpu" if "cpu" in kinds else kinds[0])  # that of the back end's tensors
        # Never taken back: a collective whose time ran out leaves messages that the next would receive.
        self._lost: RankError | None = None  # why this group can't be used any more

    def tell(self, error: Exception | None, say: object = None) -> tuple[Exception | None, list[Any]]:
        """Tell all ranks of the group this rank's error, and `say`. Every rank must call it.

        Returns the error to leave with, this rank's first, if any rank has one; and what each rank says,
        nothing if not all came within the patience. Then the group can't be used any more.
        """
        if self._lost is not None:
            return error or self._lost, []
        deadline = time.monotonic() + self.patience
        try:
            heard = self._gathered(pickle.dumps((_news(error), say)))
        except Exception as trouble:  # noqa: BLE001  out of memory too: the others wait for this rank
            return self._leave(trouble, error, deadline), []
        first = next((_heard(news) for news, _ in heard if news is not None), None)
        return error or first, [words for _, words in heard]

    def run(self, start: Callable[[], Any], error: Exception | None = None) -> None:
        """Run a collective, which all ranks have begun, to its end; after a failure they receive `error`."""
        try:
            self._wait(start, None)
        except Exception as trouble:
            raise self._leave(trouble, error, time.monotonic() + self.patience) from trouble

    def meet(self, place: str, news: str | None, deadline: float) -> RankError | None:
        """Ask the ranks' store who is absent at the deadline, and what the others report."""
        names = {rank: f"npu_replay/{place}/{rank}" for rank in self.ranks}
        board = f"npu_replay/{place}/news"
        try:
            # torch has no public way to the store of a group.
            store: Any = dist.distributed_c10d._world.pg_map[self.group][1]
            if news is not None:
                store.compare_set(board, "", news)  # only the first report is kept
            store.set(names[dist.get_rank()], "here")
            with suppress(RuntimeError):  # some are late
                store.wait(list(names.values()), timedelta(seconds=max(deadline - time.monotonic(), 0.1)))
            if not store.check(list(names.values())):
                absent = [rank for rank, name in names.items() if not store.check([name])]
                return self._error(
                    f"all {len(names)} ranks of the group within {self.patience:g} s",
                    f"nothing from ranks {_some(absent)}",
                    self._cause,
                )
            return _heard(store.get(board).decode()) if store.check([board]) else None
        except dist.DistNetworkError as closed:
            return self._error(
                "the store that the ranks met in",
                f"it no longer answers ({closed})",
                "the process that keeps it has ended, which is rank 0 or its launcher: see its log",
            )

    def _error(self, expected: str, got: str, cause: str) -> RankError:
        return RankError(
            self._problem, where=f"rank {dist.get_rank()}", expected=expected, got=got, cause=cause
        )

    def _gathered(self, data: bytes) -> list[Any]:
        """Return what each rank has pickled."""
        # The lengths are sent first, as all_gather needs tensors of one size.
        size = torch.tensor([len(data)], device=self.device)
        sizes = [torch.empty_like(size) for _ in self.ranks]
        self._wait(lambda: dist.all_gather(sizes, size, self.group, async_op=True), self.patience)
        lengths = [int(size) for size in sizes]
        mine = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        mine = mine.to(self.device)
        all_of_them = [torch.empty_like(mine) for _ in self.ranks]
        self._wait(lambda: dist.all_gather(all_of_them, mine, self.group, async_op=True), self.patience)
        pairs = zip(all_of_them, lengths, strict=True)
        return [pickle.loads(part.cpu().numpy()[:length].data) for part, length in pairs]

    def _wait(self, start: Callable[[], Any], seconds: float | None) -> None:
        """Wait for a collective; without `seconds` as long as the group's timeout."""
        try:
            work = start()
            if self.device.type == "cpu":
                work.wait(*(() if seconds is None else (timedelta(seconds=seconds),)))
                return
            # Polled: waiting for NCCL with a timeout of our own would end the process.
            deadline = time.monotonic() + (seconds or float("inf"))
            nap = 1e-4
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise _Broken(f"nothing within {seconds:g} s")
                time.sleep(nap)
                nap = min(2 * nap, 0.01)
            work.wait()
        except RuntimeError as failed:
            raise _Broken(str(failed).partition("\n")[0]) from failed

    def _leave(self, trouble: Exception, error: Exception | None, deadline: float) -> Exception:
        """Return the error to leave with, this rank's first, after all living ranks have signed."""
        own = error or (None if isinstance(trouble, _Broken) else trouble)
        if self.device.type == "cpu":
            # This is a hack: the others stop waiting at once when gloo's connections close. gloo has no call
            # for this, but closes all of them when the wait for one message times out.
            for rank in set(self.ranks) - {dist.get_rank()}:
                with suppress(RuntimeError):
                    nothing: Any = dist.irecv(
                        torch.empty(1, dtype=torch.uint8, device="cpu"), rank, self.group, _TAG
                    )
                    nothing.wait(timedelta(milliseconds=10))
        grace = min(max(1.0, self.patience / 4), 10.0)
        self._lost = self.meet("left", _news(own), deadline + grace) or self._error(
            f"that ranks {_some(self.ranks)} can talk to each other",
            str(trouble),
            "the network between them; a rank that came later than all the others waited for; or an earlier "
            "wait in this group that ran out, after which only new groups can be used",
        )
        return own or self._lost


class Outcome:
    """Keeps this rank's first error, and tells it to each group, whose ranks wait for it."""

    error: Exception | None = None

    def attempt(self, step: Callable[..., _T], *arguments: Any) -> _T | None:
        """Run a step, unless there is an error; return None if there is one afterwards."""
        if self.error is None:
            try:
                return step(*arguments)
            except Exception as problem:  # noqa: BLE001  whatever it is, the other ranks wait for us
                self.error = problem
        return None

    def agree(self, peers: RankGroup, say: object = None) -> list[Any]:
        """Return what each rank of a group says; an error of one rank becomes an error of all."""
        self.error, words = peers.tell(self.error, say)
        return words


def all_here(patience: float = PATIENCE) -> None:
    """Wait until every rank of the job has called this as often as this one; else name those that haven't.

    Call it once before the first collective that some ranks may not run: a missing rank would hang the others
    until the timeout of that, ten to thirty minutes, and wouldn't be named.
    """
    global _calls
    if _alone():
        return
    _calls += 1
    cause = f"npu_replay isn't installed on a node, or NPU_REPLAY_DISABLE=on is set there alone; or {_FAILED}"
    peers = RankGroup(dist.group.WORLD, patience, "not all ranks take part in the replay", cause)
    error = peers.meet(str(_calls), None, time.monotonic() + patience)
    if error is not None:
        raise error


def gathered(say: object) -> list[Any]:
    """Return what each rank of the job says. Every rank must call it."""
    if _alone():
        return [say]
    peers = RankGroup(dist.group.WORLD, 20.0, "not all ranks came to the first pass", _FAILED)
    stop, words = peers.tell(None, say)
    if stop is not None:
        raise stop
    return words


def agreed(error: ReplayError | None, counts: Mapping[str, int]) -> dict[str, int]:
    """Sum whole numbers over all ranks of the job, unless one has an error. Every rank must call it.

    The names in `counts` are the same on every rank. The lowest rank with an error raises it; the others
    raise one line about it. Without a process group the counts themselves are returned.
    """
    if _alone():
        if error is not None:
            raise error
        return dict(counts)
    peers = RankGroup(dist.group.WORLD, 20.0, "not all ranks came to the end of the step", _FAILED)
    # int64, which every back end has; float64 fails under MindSpeed.
    totals = torch.tensor([error is not None, *counts.values()], dtype=torch.int64, device=peers.device)
    peers.run(lambda: dist.all_reduce(totals, async_op=True), error)
    failed, *sums = totals.tolist()
    if not failed:
        return dict(zip(counts, sums, strict=True))
    stop, lines = peers.tell(error, None if error is None else error.line)
    lowest = next((rank for rank, line in enumerate(lines) if line is not None), peers.me)
    if stop is None or lowest != peers.me:
        also = "" if error is None else f" (and this rank: {error.line})"
        raise _heard(f"rank {lowest} stopped, and so does this one: {lines[lowest]}{also}")
    if error is not None:
        error.shared = True
    raise stop


def _alone() -> bool:
    return not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1


def _news(error: Exception | None) -> str | None:
    """Return the text of this rank's error for the other ranks."""
    if error is None:
        return None
    # Of a foreign error, whose own __str__ may fail, the other ranks need a text all the same.
    text = str(error) if isinstance(error, ReplayError) else f"{type(error).__name__}: {as_text(error)}"
    text = text.removeprefix("[npu_replay] ").encode(errors="replace").decode()  # stores take UTF-8 only
    stopped = f"rank {dist.get_rank()} stopped, and so does this one: "
    return text if isinstance(error, RankError) else stopped + text


def _heard(news: str) -> RankError:
    """Make the error that all ranks raise for another rank's."""
    error = RankError(news)
    error.shared = True
    return error


def _some(ranks: Sequence[int]) -> str:
    return f"{list(ranks[:16])}{' and more' if len(ranks) > 16 else ''}"
