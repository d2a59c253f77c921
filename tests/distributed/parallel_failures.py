"""What a job of two pipeline stages does when one of its ranks has an error: all have one, soon."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

import npu_replay
from distributed import parallel_model as pm
from distributed.parallel_cases import Case, Checks, Job, foreign_routes

PATIENCE = 2.0
COLLECTING = {
    # what rank 1 does: (recorded routes, layouts) that it collects with
    "a layout too few": lambda routes, layouts: (routes, layouts[:-1]),
    "layouts of another order": lambda routes, layouts: (routes, layouts[::-1]),
    "no layouts": lambda routes, layouts: (routes, [None for _ in layouts]),
    "a micro-batch too few": lambda routes, layouts: (routes[:-1], layouts[:-1]),
}
CHECKS = (
    *COLLECTING,
    "collect works after errors",
    "rank 1 doesn't collect",
    "rank 0 doesn't collect",
    "routes lack a layer",
)


def run(folder: Path) -> None:
    checks = Checks(folder / f"results-{dist.get_rank()}.jsonl")
    checks.case = "failures"
    job = _started()
    batches = job.plan()
    layouts = [job.layout(batch) for batch in batches]
    with npu_replay.record(job.chunks) as recording:
        pm.step(job.chunks, job.split, batches, forward_only=True)
    second = dist.get_rank() == 1
    for name, change in COLLECTING.items():
        routes, theirs = change(recording.routes, layouts) if second else (recording.routes, layouts)
        _raises(checks, name, npu_replay.ReplayError, 5.0, _collecting(job, routes, theirs, 20.0))
    with checks.holds("collect works after errors"):
        assert len(npu_replay.collect(recording, layouts, job.parallel) or []) == len(pm.SEQUENCES)
    for absent in (1, 0):
        name = f"rank {absent} doesn't collect"
        if dist.get_rank() == absent:
            checks.note(name)
        else:
            collects = _collecting(job, recording.routes, layouts, PATIENCE)
            _raises(checks, name, npu_replay.ReplayError, 10.0, collects)
        dist.barrier()
        job = _started()
    _lack_a_layer(job, checks)


def _started() -> Job:
    """Two stages in groups of their own: one that somebody waited for in vain is of no more use."""
    split = pm.Split(pp=2).start()
    chunks = pm.build(split)
    return Job(
        Case(split=split, even=True), split, chunks, {}, npu_replay.ParallelLayout.from_megatron(chunks)
    )


def _lack_a_layer(job: Job, checks: Checks) -> None:
    """Rank 1 has no routes for its last layer; its process ends, and rank 0 waits for what never comes."""
    second = dist.get_rank() == 1
    layers = [layer for layer in job.parallel.moe_layers if not (second and layer == 3)]
    sequences, batches = foreign_routes(range(pm.LAYERS)), job.plan()
    routes = [
        job.layout(batch).gather([sequences[number] for number in batch.numbers], layers=layers)
        for batch in batches
    ]

    def replays() -> None:
        with npu_replay.replay(job.chunks, routes):
            pm.step(job.chunks, job.split, batches)

    dist.barrier()
    _raises(checks, "routes lack a layer", npu_replay.ReplayError if second else RuntimeError, 20.0, replays)
    raise SystemExit(not second)  # the first that fails takes the other down, so that has to be the last


def _collecting(job: Job, routes: Any, layouts: Any, patience: float) -> Callable[[], object]:
    return lambda: npu_replay.collect(routes, layouts, job.parallel, patience=patience)


def _raises(
    checks: Checks, name: str, kind: type[Exception], seconds: float, work: Callable[[], object]
) -> None:
    """`work` ends with this kind of error, and within so many seconds."""
    started = time.monotonic()
    try:
        work()
    except kind as error:
        took = time.monotonic() - started
        checks.note(name, "" if took < seconds else f"{took:.1f} s, not {seconds}: {error}")
    else:
        checks.note(name, f"no {kind.__name__}")
