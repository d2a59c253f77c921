"""Are all ranks of the job here? Asked once, before the first collective that not everybody may know of.

Through the store that the ranks met in: a collective with one rank missing is a hang until its timeout, which
is half an hour or ten, and names nobody.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from npu_replay.errors import ReplayError

PATIENCE = 300.0
"""Seconds. Ranks come to a job's first pass together, but for loading weights and first kernels."""

_calls = 0


def all_here(patience: float = PATIENCE) -> None:
    """Wait until every rank of the job has asked as often as this one.

    Raises:
        ReplayError: some haven't within so many seconds; says which. Or nobody can be asked any more.
    """
    global _calls
    if not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    _calls += 1
    store: Any = dist.distributed_c10d._get_default_store()
    names = [f"npu_replay/{_calls}/{rank}" for rank in range(dist.get_world_size())]
    try:
        store.set(names[dist.get_rank()], "here")
        store.wait(names, timedelta(seconds=patience))
    except dist.DistNetworkError as closed:
        raise ReplayError(
            "not all ranks take part in the replay",
            where=f"rank {dist.get_rank()}",
            expected="the store that the ranks met in",
            got=f"it no longer answers ({closed})",
            cause="the process that keeps it has ended, which is rank 0 or its launcher: see its log",
        ) from closed
    except RuntimeError as late:
        absent = [rank for rank, name in enumerate(names) if not store.check([name])]
        raise ReplayError(
            "not all ranks take part in the replay",
            where=f"rank {dist.get_rank()}",
            expected=f"all {len(names)} ranks at their first pass within {patience:g} s",
            got=f"nothing from ranks {absent[:16]}{' and more' if len(absent) > 16 else ''}",
            cause="npu_replay isn't installed on a node, or NPU_REPLAY_DISABLE=1 is set there alone; or a "
            "rank that failed before (see its log)",
        ) from late
