"""Who is missing, who failed, and how all ranks of a group leave together.

Where all is well, one collective says so. Where one fails or takes too long, the store that the ranks met in
is asked: each rank that is alive signs there, with its own error if it has one, and only ranks that don't
sign are named. gloo doesn't know: whoever leaves closes its connections, and looks as dead as the dead.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from npu_replay.errors import ReplayError

PATIENCE = 300.0
"""Seconds. Ranks come to a job's first pass together, but for loading weights and first kernels."""

_TAG = 0x6E7075
"""Not 0: the job's own messages may be on their way in this group."""

_FAILED = "a rank that failed before (see its log)"

_calls = 0


class LostRanks(ReplayError):
    """Some ranks didn't come, or are gone.

    Attributes:
        absent: their global ranks; empty where the store can't be asked.
    """

    absent: tuple[int, ...] = ()


class StoppedByRank(ReplayError):
    """Another rank has an error, so this one stops too.

    Attributes:
        rank: the global rank that has it.
        text: what it said.
    """

    shared = True

    def __init__(self, rank: int, text: str, own: ReplayError | None = None) -> None:
        also = "" if own is None else f" (and this rank: {own.line})"
        said = text.removeprefix("[npu_replay] ")
        super().__init__(f"rank {rank} stopped, and so does this one: {said}{also}")
        self.rank, self.text = rank, text


class _Broken(Exception):
    """A collective failed, or was waited for too long."""


Problem = tuple[int, str] | None
"""The global rank that has an error, and its text."""


class Circle:
    """The ranks of one process group, who hear of each other's errors.

    Args:
        group: the process group.
        patience: seconds to wait for ranks that come later than this one.
        purpose: what they come to, for the message.
        cause: why a rank usually doesn't.
    """

    def __init__(self, group: Any, patience: float, purpose: str, cause: str) -> None:
        self.group, self.patience, self._purpose, self._cause = group, patience, purpose, cause
        self.ranks: list[int] = dist.get_process_group_ranks(group)
        self.me: int = dist.get_rank(group)
        self.device = _device(group)
        self.lost: ReplayError | None = None
        """Why this group is of no more use."""

    def tell(self, error: Exception | None, say: object = None) -> list[tuple[Problem, Any]]:
        """What each rank of the group has to say, and its error. Every rank has to call it.

        Raises:
            ReplayError: not all came within the patience; `lost` from then on. Or what this rank failed with.
        """
        if self.lost is not None:
            raise self.lost
        started = time.monotonic()
        try:
            return self._gathered(pickle.dumps((_problem(error), say)), self.patience)
        except Exception as trouble:  # for want of memory too: the others wait for this rank
            raise self._leave(trouble, error, started + self.patience) from trouble

    def run(self, start: Callable[[], Any], error: Exception | None = None) -> None:
        """A collective that all ranks have begun to run, to its end.

        If it fails the others hear of `error`.

        Raises:
            ReplayError: it failed.
        """
        try:
            self._wait(start, None)
        except Exception as trouble:
            raise self._leave(trouble, error, time.monotonic() + self.patience) from trouble

    def _gathered(self, data: bytes, seconds: float) -> list[tuple[Problem, Any]]:
        """What each rank has pickled; its length first."""
        size = torch.tensor([len(data)], device=self.device)
        sizes = [torch.empty_like(size) for _ in self.ranks]
        self._wait(lambda: dist.all_gather(sizes, size, self.group, async_op=True), seconds)
        lengths = [int(one) for one in sizes]
        mine = torch.zeros(max(lengths), dtype=torch.uint8)
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        mine = mine.to(self.device)
        theirs = [torch.empty_like(mine) for _ in self.ranks]
        self._wait(lambda: dist.all_gather(theirs, mine, self.group, async_op=True), seconds)
        return [
            pickle.loads(one.cpu().numpy()[:length].data) for one, length in zip(theirs, lengths, strict=True)
        ]

    def _wait(self, start: Callable[[], Any], seconds: float | None) -> None:
        """For a collective; without `seconds` as long as the group's timeout."""
        try:
            work = start()
            if self.device.type == "cpu":
                work.wait(*(() if seconds is None else (timedelta(seconds=seconds),)))
                return
            # Others can't be waited for within a time of our own: NCCL would end the process.
            deadline, nap = time.monotonic() + (seconds or float("inf")), 1e-4
            while not work.is_completed():
                if time.monotonic() > deadline:
                    raise _Broken(f"nothing within {seconds:g} s")
                time.sleep(nap)
                nap = min(2 * nap, 0.01)
            work.wait()
        except RuntimeError as failed:
            raise _Broken(str(failed).partition("\n")[0]) from failed

    def _leave(self, trouble: Exception, error: Exception | None, deadline: float) -> Exception:
        """The error to leave with, the own one first, when all who are alive have signed that they leave."""
        own = error or (None if isinstance(trouble, _Broken) else trouble)
        self._hang_up()
        self.lost = self._roll(trouble, own, deadline + min(max(1.0, self.patience / 4), 10.0))
        return own or self.lost

    def _hang_up(self) -> None:
        """Close the group's connections, where it is gloo's: the others stop waiting at once.

        It has no call for that, but closes all of them where one message was waited for in vain.
        """
        if self.device.type != "cpu":
            return
        for rank in self.ranks:
            if rank != self.ranks[self.me]:
                try:
                    nothing = torch.empty(1, dtype=torch.uint8)
                    dist.irecv(nothing, rank, self.group, _TAG).wait(timedelta(milliseconds=10))  # type: ignore[union-attr]
                except RuntimeError:
                    continue

    def _roll(self, trouble: Exception, own: Exception | None, deadline: float) -> ReplayError:
        """Sign, wait for the others' signatures, and read them."""
        mine = self.ranks[self.me]
        names = {rank: f"npu_replay/left/{rank}" for rank in self.ranks}
        where = f"rank {mine}"
        known = list(own.absent) if isinstance(own, LostRanks) else []
        try:
            store: Any = dist.distributed_c10d._world.pg_map[self.group][1]
            store.set(names[mine], json.dumps([known, None if known else _problem(own)]))
            absent = set(_absent(store, names, deadline - time.monotonic()))
            signed = [json.loads(store.get(names[rank])) for rank in self.ranks if rank not in absent]
        except dist.DistNetworkError as closed:
            return _no_store(self._purpose, where, closed)
        absent.update(rank for known, _ in signed for rank in known)
        problems = [tuple(problem) for _, problem in signed if problem is not None]
        if absent:
            return _lost(
                self._purpose,
                where,
                sorted(absent),
                f"all {len(names)} ranks of the group within {self.patience:g} s",
                self._cause,
            )
        if problems:
            return StoppedByRank(*problems[0])
        return LostRanks(
            f"the ranks of a group can't talk to each other any more: {self._purpose}",
            where=where,
            expected=f"a collective of ranks {_some(self.ranks)}",
            got=str(trouble),
            cause="the network between them, or a rank that came later than all the others waited for",
        )


def all_here(patience: float = PATIENCE) -> None:
    """Wait until every rank of the job has asked as often as this one.

    Asked once, before the first collective that not everybody may know of: with one rank missing that is a
    hang until its timeout, which is half an hour or ten, and names nobody.

    Raises:
        ReplayError: some haven't within so many seconds; says which. Or nobody can be asked any more.
    """
    global _calls
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    _calls += 1
    purpose, where = "not all ranks take part in the replay", f"rank {dist.get_rank()}"
    store: Any = dist.distributed_c10d._get_default_store()
    names = {rank: f"npu_replay/{_calls}/{rank}" for rank in range(dist.get_world_size())}
    try:
        store.set(names[dist.get_rank()], "here")
        absent = _absent(store, names, patience)
    except dist.DistNetworkError as closed:
        raise _no_store(purpose, where, closed) from closed
    if absent:
        cause = (
            f"npu_replay isn't installed on a node, or NPU_REPLAY_DISABLE=1 is set there alone; or {_FAILED}"
        )
        raise _lost(
            purpose, where, absent, f"all {len(names)} ranks at their first pass within {patience:g} s", cause
        )


def agreed(error: ReplayError | None, counts: Mapping[str, int]) -> dict[str, int]:
    """Sum `counts` over all ranks of the job, unless one has an error. Every rank has to call it.

    One all-reduce of int64, which every back end has (float64 fails under MindSpeed).

    Args:
        error: this rank's.
        counts: whole numbers; the same names on every rank.

    Returns:
        The sums; without a process group the counts themselves.

    Raises:
        ReplayError: this rank's own error, on the lowest rank that has one; on the others one line about it.
            Or ranks are gone.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise error
        return dict(counts)
    circle = Circle(dist.group.WORLD, 20.0, "not all ranks came to the end of the step", _FAILED)
    told = torch.tensor([error is not None, *counts.values()], dtype=torch.int64, device=circle.device)
    circle.run(lambda: dist.all_reduce(told, async_op=True), error)
    failed, *sums = told.tolist()
    if failed:
        _leave_together(circle, error)
    return dict(zip(counts, sums, strict=True))


def _leave_together(circle: Circle, error: ReplayError | None) -> None:
    """Raise on every rank: the lowest that has an error its own, the others a line about it."""
    lines = [line for _, line in circle.tell(error, None if error is None else error.line)]
    lowest = next(rank for rank, line in enumerate(lines) if line is not None)
    if error is not None and circle.me == lowest:
        error.shared = True
        raise error
    raise StoppedByRank(lowest, str(lines[lowest]), error)


def _problem(error: Exception | None) -> Problem:
    """Whose error this is, and what it says."""
    if error is None or isinstance(error, StoppedByRank):
        return None if error is None else (error.rank, error.text)
    try:
        text = str(error) if isinstance(error, ReplayError) else f"{type(error).__name__}: {error}"
    except Exception as twice:  # noqa: BLE001  somebody's __str__; the ranks have to hear of it all the same
        text = f"{type(error).__name__}, whose text can't be had ({type(twice).__name__})"
    return dist.get_rank(), text


def _absent(store: Any, names: Mapping[int, str], seconds: float) -> list[int]:
    """The ranks whose names aren't in the store after so many seconds."""
    try:
        store.wait(list(names.values()), timedelta(seconds=max(seconds, 0.1)))
    except dist.DistNetworkError:
        raise
    except RuntimeError:
        return [rank for rank, name in names.items() if not store.check([name])]
    return []


def _lost(problem: str, where: str, absent: list[int], expected: str, cause: str) -> LostRanks:
    got = f"nothing from ranks {_some(absent)}"
    error = LostRanks(problem, where=where, expected=expected, got=got, cause=cause)
    error.absent = tuple(absent)
    return error


def _some(ranks: list[int]) -> str:
    return f"{ranks[:16]}{' and more' if len(ranks) > 16 else ''}"


def _no_store(problem: str, where: str, closed: Exception) -> LostRanks:
    return LostRanks(
        problem,
        where=where,
        expected="the store that the ranks met in",
        got=f"it no longer answers ({closed})",
        cause="the process that keeps it has ended, which is rank 0 or its launcher: see its log",
    )


def _device(group: Any) -> torch.device:
    """Where the group's back end wants tensors: the CPU if it can."""
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])
