"""Who of a gloo group is here? Asked within a time of our own: a collective waits for the group's timeout.

(torch's monitored_barrier keeps to its timeout on the first rank only, and not where that one is missing.)
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_TAG = 0x6E7075
"""Not 0: the job's own messages may be on their way in this group."""


def missing(group: Any, patience: float) -> list[int]:
    """The global ranks of the group that don't answer within so many seconds. All ranks have to ask.

    Whom a rank waited for in vain it can't talk to any more: gloo closes what timed out.
    """
    others = [rank for rank in dist.get_process_group_ranks(group) if rank != dist.get_rank()]
    here, answer = torch.ones(1, dtype=torch.uint8), torch.zeros(len(others), dtype=torch.uint8)
    answers = [
        dist.irecv(answer[number : number + 1], rank, group, _TAG) for number, rank in enumerate(others)
    ]
    calls = [dist.isend(here, rank, group, _TAG) for rank in others]
    deadline = time.monotonic() + patience
    absent = [
        rank
        for rank, work in zip(others, answers, strict=True)
        if not _came(work, deadline - time.monotonic())
    ]
    if not absent:
        for call in calls:
            call.wait()  # type: ignore[union-attr]  # None only for ranks outside the group
    return absent


def _came(work: Any, seconds: float) -> bool:
    try:
        work.wait(timedelta(seconds=max(seconds, 0.1)))
    except RuntimeError:
        return False
    return True
