"""collect over real gloo processes: rows and layers merged, and every rank stopped by one rank's error.

`work` is one of four processes: two pipeline stages of two context parallel ranks. Ranks that are killed or
fail at some moment of collect are forks of it, with a store and groups of their own, one a case. The last
case loses a rank, and ends the run.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import jobs
from choice import WHOLE
from npu_replay import DecoderLayers, ParallelLayout, RoutedExperts, TokenLayout, collect, fingerprint
from npu_replay.errors import ReplayError
from npu_replay.parallel import collect as collecting
from npu_replay.parallel import rank_failures
from npu_replay.parallel.rank_failures import agreed, all_here
from npu_replay.routes.routed_experts import without_layers

PROCESSES = 4
LAST = PROCESSES - 1
STAGES = ((0, 1), (3,))
LENGTHS = ((5, 3), (4,))
EXPERTS = 300
"""More than a byte holds (T19), and no back end sends int16 (T19b): gloo refuses it, as HCCL does."""
PATIENCE = 3.0
"""Seconds, of those that wait for a rank that was killed."""
WAITS = 12
"""How often a rank waits for others before the last round: what it says and the length of it, and that it has
the memory, then a piece of each of two ranks; in each of two groups."""
KILLED = (0, 1, 3, 5, 6, 8, 10, 13, 15) if WHOLE else (0, 1, 6, 10, 15)
"""At which wait; 0 before the first."""
pytestmark = [pytest.mark.distributed, pytest.mark.slow]
Answers = dict[str, Any]
Results = dict[str, list[Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    """What each process found, by case; nothing of one that was killed."""
    return jobs.by_case("distributed.test_collecting:work", PROCESSES)


@pytest.mark.parametrize(
    "case",
    [
        "everywhere",
        "not everywhere",
        "one group",
        "twins",  # alltoall_seq: every tensor-parallel rank has all rows, T46
        "with its decoder",  # and all layers of the model are there
    ],
)
def test_rows_and_layers_of_all_ranks_become_whole_sequences(results: Results, case: str) -> None:
    """Any split of them, in one process: tests/parallel/test_collect.py."""
    assert results[case] == [True] * PROCESSES


def test_what_is_sent_and_held(results: Results) -> None:
    """The first rank alone may get it; ranks with the same rows send once, a micro-batch at a time."""
    assert results["first"] == [True, None, None, None]
    assert results["twins sent"] == [2, 0, 2, 0]
    # The most that a process holds at once, twice the result; what it recorded is counted as held before.
    shares = [float(share) for share in results["peak"] if share != "unknown"]
    assert all(share < 2.2 for share in shares), shares


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other rows", "micro-batch 1: the routes have another number of rows"),
        ("too few layouts", "another number of layouts than micro-batches"),
        ("other batch", "layouts of other sequences"),
        ("other tokens", "layouts of other sequences"),
        ("twins differ", "the same tokens and layers differently"),
        ("overlap", "recorded the same token differently"),
        ("hole", "recorded by no rank"),
        ("not covered", "recorded by no rank"),
        ("other experts", "routers of another shape"),
        ("nothing", "no rank recorded any layer"),
        ("not covered, for one rank", "recorded by no rank"),
        ("out of memory", "no memory left"),
        ("another rank's layouts", "made for another rank"),
        ("no stages", "some MoE layers of the model"),
    ],
)
def test_an_error_on_one_rank_stops_all_of_them(results: Results, case: str, words: str) -> None:
    assert len(results[case]) == PROCESSES
    for message in results[case]:
        assert words in message, message
    if case == "other rows":
        assert all(
            message.count("rank 3 stopped, and so does this one") == 1 for message in results[case][:3]
        )
        assert "stopped" not in results[case][3]


@pytest.mark.parametrize("moment", KILLED)
def test_a_killed_rank_is_named_and_no_other(results: Results, moment: int) -> None:
    survivors = results[f"killed {moment}"]
    assert len(survivors) == LAST, survivors
    messages = [message for message in survivors if message != "nothing was raised"]
    assert messages, "nobody noticed"
    assert [message for message in messages if "nothing from ranks [3]" not in message] == []
    if moment <= WAITS:
        assert messages == survivors, "some took what they had for the whole"


def test_figures_are_added_up_and_the_lowest_rank_with_an_error_has_the_whole_message(
    results: Results,
) -> None:
    assert results["sums"] == [{"ranks": 4, "rows": 80000000006}] * PROCESSES
    first, second, *others = results["errors"]
    assert first == "[npu_replay] rank 1 stopped, and so does this one: layer 4: it broke"
    assert second == "[npu_replay] layer 4: it broke. Expected sense, got none. Usual cause: bad luck on 1"
    assert others == [f"{first} (and this rank: layer 4: it broke)"] * 2
    assert results["again"] == [{"ranks": 4}] * PROCESSES, "they go on together"


def test_a_rank_that_is_not_here_is_named(results: Results) -> None:
    """A node without npu_replay, or with it turned off there alone, would be a hang."""
    assert results["all here"] == [True] * PROCESSES
    assert results["absent"][LAST] is None, "the last rank doesn't ask"
    for rank, message in enumerate(results["absent"][:LAST]):
        assert f"rank {rank}: not all ranks take part in the replay" in message
        assert "nothing from ranks [3]" in message


def test_a_store_that_has_gone_is_said_to_be_gone(results: Results) -> None:
    """Whoever keeps it has failed before; the others would show a torch.distributed.DistNetworkError."""
    for message in results["no store"]:
        assert "it no longer answers (Broken pipe)" in message
        assert "rank 0 or its launcher" in message


def test_a_rank_that_does_not_come_is_no_hang(results: Results) -> None:
    assert len(results["late"]) == LAST
    for message in results["late"]:
        assert "didn't come to collect()" in message, message
        assert "nothing from ranks [3]." in message, message


# One of the processes


def work(task: dict[str, Any]) -> Answers:
    rank = task["rank"]
    folder = Path(task["folder"])
    children = _leave(rank, folder)  # they mostly wait, and the rest goes on beside them
    answers: Answers = {}
    dist.init_process_group("gloo")
    parallel = _places(rank)
    _agree(rank, answers)
    _merge(parallel, answers)
    _merge_much(parallel, answers)
    _fail(parallel, rank == LAST, answers)
    layouts = _layouts(parallel)
    come = [folder / f"come-{here}" for here in range(LAST)]
    routes = _recorded(parallel, layouts)
    if rank == LAST:
        while not all(file.exists() for file in come):  # alive, but elsewhere
            time.sleep(0.1)
    else:
        answers["late"] = _raised(lambda: collect(routes, layouts, parallel, patience=2))
        come[rank].touch()
    for child in children:
        os.waitpid(child, 0)
    files = {f"killed {moment}": folder / f"{moment}-{rank}" for moment in KILLED}
    return answers | {case: file.read_text() for case, file in files.items() if file.exists()}


def _places(rank: int) -> ParallelLayout:
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    return ParallelLayout(cp=2, cp_rank=rank % 2, pp=2, pp_rank=rank // 2, groups=(rows, stages))


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return "nothing was raised"


def _leave(rank: int, folder: Path) -> list[int]:
    """Start the forks in which a rank is killed, one a case."""
    children = []
    for moment in KILLED:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                _in_child(rank, folder, moment)
            os._exit(0)
        children.append(child)
    return children


def _in_child(rank: int, folder: Path, moment: int) -> None:
    store = f"file://{folder / f'store-{moment}'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=PROCESSES)
    parallel = _places(rank)
    layout = TokenLayout.packed([8], parallel=parallel)
    ids = torch.arange(4).repeat(len(layout.rows), 1, 1)
    routes = RoutedExperts(ids=ids, layers=[rank // 2], num_experts=8)
    dist.barrier()
    if rank == LAST:
        _die_at(moment)
    words = _raised(lambda: collect([routes], [layout], parallel, patience=PATIENCE))
    (folder / f"{moment}-{rank}").write_text(words)
    time.sleep(1)  # who ends at once looks dead to those that still read


def _die_at(moment: int) -> None:
    """End this process at its n-th wait for others; at 0 at once."""
    wait = rank_failures.RankGroup._wait
    waits = itertools.count(1)

    def until_then(self: Any, *arguments: Any) -> None:
        if next(waits) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        wait(self, *arguments)

    rank_failures.RankGroup._wait = until_then  # type: ignore[method-assign]  # the process ends anyway
    if moment == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def _agree(rank: int, answers: Answers) -> None:
    answers["sums"] = agreed(None, {"ranks": 1, "rows": 20_000_000_000 + rank})
    luck = f"bad luck on {rank}"
    error = ReplayError("it broke", where="layer 4", expected="sense", got="none", cause=luck)
    answers["errors"] = _raised(lambda: agreed(None if rank == 0 else error, {"ranks": 1}))
    answers["again"] = agreed(None, {"ranks": 1})
    all_here(patience=60)
    answers["all here"] = True
    answers["absent"] = None if rank == LAST else _raised(lambda: all_here(patience=2))
    with mock.patch.object(dist.PrefixStore, "set", side_effect=dist.DistNetworkError("Broken pipe")):
        answers["no store"] = _raised(lambda: all_here(patience=2))
    dist.barrier()  # who leaves early cuts the others off


def _sequences() -> list[RoutedExperts]:
    """Both micro-batches' sequences, in all layers."""
    generator = torch.Generator().manual_seed(0)
    layers = [layer for stage in STAGES for layer in stage]
    return [
        RoutedExperts(
            ids=torch.rand(length, len(layers), EXPERTS, generator=generator).topk(4).indices,
            layers=layers,
            num_experts=EXPERTS,
            fingerprint=fingerprint([length]),
        )
        for lengths in LENGTHS
        for length in lengths
    ]


def _layouts(parallel: ParallelLayout) -> list[TokenLayout]:
    return [
        TokenLayout.packed(
            lengths, parallel=parallel, fingerprints=[fingerprint([length]) for length in lengths]
        )
        for lengths in LENGTHS
    ]


def _recorded(parallel: ParallelLayout, layouts: Sequence[TokenLayout]) -> list[RoutedExperts]:
    """What the routers of this rank would have seen."""
    whole = _sequences()
    layers = STAGES[parallel.pp_rank]
    batches = [whole[:2], whole[2:]]
    return [layout.gather(batch, layers=layers) for layout, batch in zip(layouts, batches, strict=True)]


def _merge(parallel: ParallelLayout, answers: Answers) -> None:
    layouts = _layouts(parallel)
    recorded = _recorded(parallel, layouts)
    whole = _sequences()
    answers["everywhere"] = collect(recorded, layouts, parallel) == whole
    answers["one group"] = collect(recorded, layouts, dist.group.WORLD) == whole
    first = collect(recorded, layouts, parallel, everywhere=False)
    answers["first"] = None if first is None else first == whole

    every = _layouts(ParallelLayout())
    mine = _recorded(ParallelLayout(pp=2, pp_rank=parallel.pp_rank), every)
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        answers["twins"] = collect(mine, every, parallel.groups) == whole
    rows = parallel.groups[0]
    sources = [call.args[1] for call in broadcast.call_args_list if call.args[2] is rows]
    answers["twins sent"] = sources.count(dist.get_rank())


def _merge_much(parallel: ParallelLayout, answers: Answers) -> None:
    """What a rank's process holds at most in a collect of 25 MB, over what it held before, in results."""
    layout = TokenLayout.packed([1 << 15] * 2, parallel=parallel)
    layers = range(24)[12 * parallel.pp_rank :][:12]
    ids = torch.arange(16, dtype=torch.uint8).repeat(len(layout.rows), len(layers), 1)
    routes = RoutedExperts(ids=ids, layers=layers, num_experts=16)
    del ids
    before = _memory("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the most since now
    except OSError:
        before = 0
    with mock.patch.object(collecting, "PIECE", 1 << 21):
        merged = collect([routes], [layout], parallel)
    size = sum(routes.ids.numel() for routes in merged or [])
    answers["peak"] = f"{(_memory('VmHWM') - before) / size:.2f}" if before else "unknown"


def _memory(name: str) -> int:
    """A line of this process's status in bytes; 0 where there is none."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _fail(parallel: ParallelLayout, last: bool, answers: Answers) -> None:
    """Each case: the last rank's arguments are wrong, or all ranks' together are."""
    layouts = _layouts(parallel)
    recorded = _recorded(parallel, layouts)

    def other(routes: RoutedExperts, first: int = 0, **changes: Any) -> RoutedExperts:
        about = {"layers": routes.layers, "num_experts": EXPERTS, "recorded": routes.recorded} | changes
        ids = routes.ids.long()
        ids[first:] = (ids[first:] + 1) % EXPERTS
        return RoutedExperts(ids=ids, **about)

    def by_hand(sizes: ParallelLayout) -> list[TokenLayout]:
        """They don't say for which rank they were made."""
        return [replace(layout, parallel=None) for layout in _layouts(sizes)]

    every = by_hand(ParallelLayout())
    half = by_hand(ParallelLayout(cp=2))
    mine = _recorded(ParallelLayout(pp=2, pp_rank=parallel.pp_rank), every)
    partly = _recorded(parallel, half)
    shifted = TokenLayout([0, 1, 2, 4, 5, 6][: len(layouts[0].rows)], LENGTHS[0], layouts[0].fingerprints)
    overlap = [other(mine[0]).take(range(6)), recorded[1]], [shifted, layouts[1]]
    wider = [other(routes, num_experts=EXPERTS + 1) for routes in recorded]
    swapped = _layouts(replace(parallel, cp_rank=1 - parallel.cp_rank))
    whole = replace(parallel, decoder=DecoderLayers(4, moe_layer_freq=[1, 1, 0, 1]))
    rows_only = replace(whole, groups=parallel.groups[:1])
    cases: dict[str, tuple[Any, ...]] = {
        "other rows": (recorded, [layouts[0], every[1]] if last else layouts),
        "too few layouts": (recorded, layouts[:1] if last else layouts),
        "other batch": (recorded[:1] if last else recorded, layouts[:1] if last else layouts),
        "other tokens": (
            recorded,
            [replace(layout, fingerprints=None) for layout in layouts] if last else layouts,
        ),
        "twins differ": ([other(routes, first=1) for routes in mine] if last else mine, every),
        "overlap": overlap if last else (recorded, layouts),
        "hole": (mine, every) if parallel.pp_rank == 0 else (partly, half),
        "not covered": (partly, half),
        "other experts": (wider if last else recorded, layouts),
        "nothing": ([without_layers()] * 2, layouts),
        "another rank's layouts": (recorded, swapped),
        "no stages": (recorded, layouts, rows_only),
    }
    for case, arguments in cases.items():
        groups = [parallel][: 3 - len(arguments)]
        answers[case] = _raised(lambda: collect(*arguments, *groups))  # noqa: B023  called at once
    answers["not covered, for one rank"] = _raised(lambda: collect(partly, half, parallel, everywhere=False))
    full = mock.patch.object(collecting.Union, "put", side_effect=MemoryError("no memory left"))
    with full if last else contextlib.nullcontext():
        answers["out of memory"] = _raised(lambda: collect(recorded, layouts, parallel))
    mixed = collect(recorded, layouts, parallel, everywhere=not last)  # each rank gets what it asks for
    answers["not everywhere"] = mixed is None if last else mixed == _sequences()
    answers["with its decoder"] = collect(recorded, layouts, whole) == _sequences()
