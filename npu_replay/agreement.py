"""All ranks of a job, once a step: does any have an error, and what did all of them count?

One all-reduce of int64, which every back end has (float64 fails under MindSpeed). Where a rank has an error,
all leave together: the lowest such rank with the whole message, the others with one line.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from npu_replay.collecting import _device
from npu_replay.errors import ReplayError


class StoppedByRank(ReplayError):
    """Another rank has an error, so this one stops too."""

    shared = True

    def __init__(self, rank: int, problem: str, own: ReplayError | None) -> None:
        also = "" if own is None else f" (and this rank: {own.line})"
        super().__init__(f"rank {rank} stopped, and so does this one: {problem}{also}")


def agreed(error: ReplayError | None, counts: Mapping[str, int]) -> dict[str, int]:
    """Sum `counts` over all ranks of the job, unless one has an error. Every rank has to call it.

    Args:
        error: this rank's.
        counts: whole numbers; the same names on every rank.

    Returns:
        The sums; without a process group the counts themselves.

    Raises:
        ReplayError: this rank's own error, on the lowest rank that has one; on the others one line about it.
    """
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise error
        return dict(counts)
    group = dist.group.WORLD
    told = torch.tensor([error is not None, *counts.values()], dtype=torch.int64, device=_device(group))
    dist.all_reduce(told)
    failed, *sums = told.tolist()
    if failed:
        _leave(error, told.device)
    return dict(zip(counts, sums, strict=True))


def _leave(error: ReplayError | None, device: torch.device) -> None:
    """Raise on every rank: find the lowest that has an error, and hear of it."""
    first = torch.tensor([dist.get_world_size() if error is None else dist.get_rank()], device=device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    lowest = int(first)
    heard = [None if error is None else error.line]
    dist.broadcast_object_list(heard, src=lowest, device=device)
    if error is not None and dist.get_rank() == lowest:
        error.shared = True
        raise error
    raise StoppedByRank(lowest, str(heard[0]), error)
