"""A rank is killed or fails at some moment of collect: all others have an error, which names that rank alone.

`work` is one of four ranks, two pipeline stages of two context parallel ranks. Each case runs in a process of
its own, forked from it, and has a store and groups of its own.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import jobs
from choice import WHOLE

PROCESSES = 4
PATIENCE = 4.0
LAST = PROCESSES - 1
FAILS = 1
WAITS = 12
"""How often a rank waits for others before the last round: what it says and the length of it, and that it has
the memory, then a piece of each of two ranks; in each of two groups."""

KILLED = {"before": 0} | {
    f"wait {number}": number for number in ((1, 3, 5, 6, 8, 10, 13, 15) if WHOLE else (1, 6, 10, 15))
}
FAILING = {
    # where the memory is wanting: what to patch there
    "offering": ("npu_replay.parallel.merge.Block.part", 1),
    "preparing": ("npu_replay.parallel.collect.Union", 1),
    "a buffer": ("npu_replay.parallel.collect.torch.empty", 1),
    "putting in": ("npu_replay.parallel.collect.Union.put", 1),
    "the result": ("npu_replay.parallel.collect.Union.block", 2),
    "saying it": ("npu_replay.parallel.rank_failures.pickle.dumps", 1),
    "saying it again": ("npu_replay.parallel.rank_failures.pickle.dumps", 4),
    "hearing it": ("npu_replay.parallel.rank_failures.pickle.loads", 1),
}

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def results() -> dict[str, list[str]]:
    """What each rank found, by case; nothing of one that was killed."""
    return jobs.by_case("distributed.test_leaving:work", PROCESSES)


@pytest.mark.parametrize("case", KILLED)
def test_a_killed_rank_is_named_and_no_other(results: dict[str, list[str]], case: str) -> None:
    survivors = results[f"killed {case}"]
    assert len(survivors) == LAST, survivors
    told = [found for found in survivors if not found.startswith("done")]
    assert told, "nobody noticed"
    for found in told:
        assert "nothing from ranks [3]" in found, found
    if KILLED[case] <= WAITS:
        assert told == survivors, "some took what they had for the whole"


@pytest.mark.parametrize("case", FAILING)
def test_all_hear_of_a_rank_without_memory_before_their_patience_ends(
    results: dict[str, list[str]], case: str
) -> None:
    found = results[f"failing {case}"]
    assert len(found) == PROCESSES
    for rank, one in enumerate(found):
        seconds, _, text = one.partition(" ")
        assert "no memory left" in text, found
        assert ("rank 1 stopped" in text) == (rank != FAILS), found
        assert float(seconds) < PATIENCE, found


# One of the ranks


def work(task: dict[str, Any]) -> dict[str, str]:
    import npu_replay.parallel.collect  # noqa: F401  once, for all cases

    folder, rank = Path(task["folder"]), task["rank"]
    cases: dict[str, Callable[[], Any]] = {}
    for name, moment in KILLED.items():
        cases[f"killed {name}"] = lambda at=moment: _killed(rank, at)  # type: ignore[misc]
    for name, (where, call) in FAILING.items():
        cases[f"failing {name}"] = lambda at=where, on=call: _failing(rank, at, on)  # type: ignore[misc]
    children = []
    for number, (name, run) in enumerate(cases.items()):
        child = os.fork()
        if child == 0:
            try:
                _in_child(folder, rank, number, name, run)
            finally:
                os._exit(0)
        children.append(child)
        if len(children) == 8:  # thirty-two processes at a time
            _wait_for(children)
    _wait_for(children)
    found = [folder / f"{number}-{rank}" for number in range(len(cases))]
    return dict(one.read_text().split(" = ", 1) for one in found if one.exists())


def _wait_for(children: list[int]) -> None:
    while children:
        os.waitpid(children.pop(), 0)


def _in_child(folder: Path, rank: int, number: int, name: str, run: Callable[[], Any]) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "gloo", init_method=f"file://{folder / f'store-{number}'}", rank=rank, world_size=PROCESSES
    )
    started = time.monotonic()
    with run():
        found = _collects(rank)
    if name.startswith("failing"):
        found = f"{time.monotonic() - started:.1f} {found}"
    (folder / f"{number}-{rank}").write_text(f"{name} = {found}")
    time.sleep(1)  # who ends at once looks dead to those that still read


def _collects(rank: int) -> str:
    import torch
    import torch.distributed as dist

    from npu_replay import ParallelLayout, RoutedExperts, TokenLayout, collect

    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    parallel = ParallelLayout(cp=2, cp_rank=rank % 2, pp=2, pp_rank=rank // 2, groups=(rows, stages))
    layout = TokenLayout.packed([8], parallel=parallel)
    ids = torch.arange(4).repeat(len(layout.rows), 1, 1)
    routes = RoutedExperts(ids=ids, layers=[rank // 2], num_experts=8)
    dist.barrier()
    try:
        collect([routes], [layout], parallel, patience=PATIENCE)
    except Exception as error:
        return f"{type(error).__name__} {error}"
    return "done"


def _killed(rank: int, moment: int) -> Any:
    """The last rank ends itself at its n-th wait for others; at 0 when it begins to collect."""
    from npu_replay.parallel import collect as collecting
    from npu_replay.parallel import rank_failures

    calls = 0
    wait = rank_failures.RankGroup._wait

    def until_then(self: Any, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        wait(self, *arguments)

    if rank != LAST:
        return mock.MagicMock()
    if moment == 0:
        gone = mock.Mock(side_effect=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        return mock.patch.object(collecting, "_given", gone)
    return mock.patch.object(rank_failures.RankGroup, "_wait", until_then)


def _failing(rank: int, where: str, on: int) -> Any:
    """One rank has no memory left at its n-th call of something."""
    if rank != FAILS:
        return mock.MagicMock()
    from importlib import import_module

    package, module, *names = where.split(".")
    owner: Any = import_module(f"{package}.{module}")
    for name in names[:-1]:
        owner = getattr(owner, name)
    works = getattr(owner, names[-1])
    calls = 0

    def fails(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == on:
            raise MemoryError("no memory left")
        return works(*arguments, **named)

    return mock.patch.object(owner, names[-1], fails)
