"""collect over real gloo processes: rows and layers merged, and every rank stopped by one rank's error.

`work` is one of four processes: two pipeline stages of two context parallel ranks. The last case loses a
rank, and ends the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import jobs

if TYPE_CHECKING:
    from npu_replay import ParallelLayout, RoutedExperts, TokenLayout

PROCESSES = 4
STAGES = ((0, 1), (3,))
LENGTHS = ((5, 3), (4,))
EXPERTS = 300  # more than a byte holds (T19), and no back end sends int16 (T19b)

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


@pytest.fixture(scope="module")
def results() -> dict[str, list[str]]:
    """What each process found, by case."""
    return jobs.by_case("distributed.test_collecting:work", PROCESSES)


@pytest.mark.parametrize(
    "case",
    [
        "everywhere",
        "one group",
        "gaps in stage 0",  # rows without a route stay without one, on whichever rank it was missing
        "gaps in stage 1",
        "dense stage",  # a stage without MoE layers takes part: T43
        "twins",  # alltoall_seq: every tensor-parallel rank has all rows, T46
        "with its decoder",  # and all layers of the model are there
    ],
)
def test_rows_and_layers_of_all_ranks_become_whole_sequences(
    results: dict[str, list[str]], case: str
) -> None:
    assert results[case] == ["True"] * PROCESSES


def test_the_first_rank_alone_may_get_them_and_ranks_with_the_same_rows_send_once(
    results: dict[str, list[str]],
) -> None:
    assert results["first"] == ["True", "None", "None", "None"]
    assert results["twins sent"] == ["2", "0", "2", "0"], "a micro-batch at a time"


def test_what_is_sent_is_hardly_more_than_the_routes(results: dict[str, list[str]]) -> None:
    assert all(float(share) < 1.05 for share in results["sent"])


def test_a_rank_needs_twice_the_result_beside_what_it_recorded(results: dict[str, list[str]]) -> None:
    """The most that its process holds at once; what it recorded is counted as held before."""
    if results["peak"][0] == "unknown":
        pytest.skip("the system doesn't say how much memory a process had at most since a moment")
    assert all(float(share) < 2.2 for share in results["peak"]), results["peak"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("other rows", "micro-batch 1: the routes have another number of rows than the layout"),
        ("too few layouts", "another number of layouts than micro-batches were recorded"),
        ("not routes", "Expected one RoutedExperts a micro-batch, got ['int', 'int']"),
        ("an exception", "no such file"),
        ("other batch", "the ranks have layouts of other sequences"),
        ("twins differ", "two ranks recorded the same tokens and layers differently"),
        ("overlap", "two ranks recorded the same token differently"),
        ("hole", "recorded by no rank"),
        ("not covered", "tokens were recorded by no rank"),
        ("other experts", "the ranks recorded routers of another shape"),
        ("nothing", "no rank recorded any layer"),
        ("not covered, for one rank", "tokens were recorded by no rank"),
        ("a single layout", "layouts are given as a list"),
        ("a single route", "routes are given as a list"),
        ("no list", "layouts are given as a list"),
        ("out of memory", "MemoryError"),
        ("not everywhere", "the ranks disagree about who gets the result"),
        ("another rank's layouts", "the layout was made for another rank"),
        ("no stages", "some MoE layers of the model were recorded by no rank"),
    ],
)
def test_an_error_on_one_rank_stops_all_of_them(results: dict[str, list[str]], case: str, words: str) -> None:
    assert len(results[case]) == PROCESSES
    for found in results[case]:
        assert words in found, found
        assert "error" in found.split(" ", 1)[0], found


def test_another_ranks_error_says_which_rank(results: dict[str, list[str]]) -> None:
    told = ["stopped, and so does this one" in found for found in results["other rows"]]
    assert told == [True, True, True, False]
    assert all(found.count("rank 3 stopped") == 1 for found in results["other rows"][:3])


def test_a_rank_that_does_not_come_is_no_hang(results: dict[str, list[str]]) -> None:
    """Seconds waited: the patience of 2 s in each group, well below the 20 s that are promised."""
    for found in results["late"][:3]:
        assert "didn't come to collect()" in found, found
        assert "nothing from ranks [3]." in found, found
    assert all(float(seconds) < 10 for seconds in results["late seconds"][:3])


# One of the processes


def work(task: dict[str, Any]) -> dict[str, str]:
    import torch
    import torch.distributed as dist

    from npu_replay import ParallelLayout

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = task["rank"]
    rows = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    parallel = ParallelLayout(cp=2, cp_rank=rank % 2, pp=2, pp_rank=rank // 2, groups=(rows, stages))
    found: dict[str, str] = {}

    def tell(case: str, what: object) -> None:
        found[case] = str(what)

    _merge(parallel, tell)
    _merge_much(parallel, tell)
    _fail(parallel, rank, tell)
    _lose_a_rank(parallel, rank, tell)
    return found


def _sequences() -> list[RoutedExperts]:
    """Both micro-batches' sequences, in all layers."""
    import torch

    from npu_replay import RoutedExperts, fingerprint

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
    from npu_replay import TokenLayout, fingerprint

    return [
        TokenLayout.packed(lengths, parallel=parallel, fingerprints=[fingerprint([one]) for one in lengths])
        for lengths in LENGTHS
    ]


def _by_hand(layouts: list[TokenLayout]) -> list[TokenLayout]:
    """The same, but they don't say for which rank they were made."""
    from dataclasses import replace

    return [replace(layout, parallel=None) for layout in layouts]


def _recorded(parallel: ParallelLayout, layouts: list[TokenLayout]) -> list[RoutedExperts]:
    """What the routers of this rank would have seen."""
    whole, layers = _sequences(), STAGES[parallel.pp_rank]
    batches = [whole[:2], whole[2:]]
    return [layout.gather(batch, layers=layers) for layout, batch in zip(layouts, batches, strict=True)]


def _merge(parallel: ParallelLayout, tell: Callable[[str, object], None]) -> None:
    from unittest import mock

    import torch.distributed as dist

    from npu_replay import ParallelLayout, collect
    from npu_replay.routes.routed_experts import without_layers

    layouts = _layouts(parallel)
    recorded, whole = _recorded(parallel, layouts), _sequences()
    tell("everywhere", collect(recorded, layouts, parallel) == whole)
    tell("one group", collect(recorded, layouts, dist.group.WORLD) == whole)
    first = collect(recorded, layouts, parallel, everywhere=False)
    tell("first", None if first is None else first == whole)

    tokens = [int(layout.rows[0]) for layout in _layouts(_other_rank(parallel))]
    for stage in range(2):
        has_gap = (parallel.cp_rank, parallel.pp_rank) == (1, stage)
        gaps = [_with_gap(one) for one in recorded] if has_gap else recorded
        missing = [(~one.recorded).nonzero()[:, 0].tolist() for one in collect(gaps, layouts, parallel) or []]
        tell(f"gaps in stage {stage}", missing == [[tokens[0]], [], [tokens[1]]])

    dense = parallel.pp_rank == 1
    found = collect([without_layers()] * 2 if dense else recorded, layouts, parallel)
    tell("dense stage", found == [one.only(STAGES[0]) for one in whole])

    every = _layouts(ParallelLayout())
    mine = _recorded(ParallelLayout(pp=2, pp_rank=parallel.pp_rank), every)
    with mock.patch.object(dist, "broadcast", wraps=dist.broadcast) as broadcast:
        tell("twins", collect(mine, every, parallel.groups) == whole)
    rows = parallel.groups[0]
    sources = [call.args[1] for call in broadcast.call_args_list if call.args[2] is rows]
    tell("twins sent", sources.count(dist.get_rank()))
    held = sum(one.ids.numel() * one.ids.element_size() for one in whole * 400)
    sent = sum(len(one.to_bytes()) for one in [whole[0].concat(whole * 400)])
    tell("sent", sent / held)


def _merge_much(parallel: ParallelLayout, tell: Callable[[str, object], None]) -> None:
    """What a rank's process holds at most in a collect of 50 MB, over what it held before, in results."""
    import torch

    from npu_replay import RoutedExperts, TokenLayout, collect
    from npu_replay.parallel import collect as collecting

    layout = TokenLayout.packed([1 << 16] * 2, parallel=parallel)
    layers = range(24)[12 * parallel.pp_rank :][:12]
    ids = torch.arange(16, dtype=torch.uint8).repeat(len(layout.rows), len(layers), 1)
    routes = RoutedExperts(ids=ids, layers=layers, num_experts=16)
    del ids
    before = _memory("VmRSS")
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the most since now
    except OSError:
        before = 0
    collecting.PIECE, usual = 1 << 22, collecting.PIECE
    found = collect([routes], [layout], parallel)
    collecting.PIECE = usual
    size = sum(one.ids.numel() for one in found or [])
    tell("peak", f"{(_memory('VmHWM') - before) / size:.2f}" if before else "unknown")


def _memory(name: str) -> int:
    """A line of this process's status in bytes; 0 where there is none."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _with_gap(routes: RoutedExperts) -> RoutedExperts:
    """The same, but the first row has no route."""
    return routes.take([-1, *range(1, len(routes))])


def _other_rank(parallel: ParallelLayout) -> ParallelLayout:
    """The rank whose routes have the gap."""
    from dataclasses import replace

    return replace(parallel, cp_rank=1, pp_rank=1)


def _fail(parallel: ParallelLayout, rank: int, tell: Callable[[str, object], None]) -> None:
    """Each case: the last rank's arguments are wrong, or all ranks' together are."""
    from npu_replay import ParallelLayout, RoutedExperts, TokenLayout, collect
    from npu_replay.routes.routed_experts import without_layers

    layouts = _layouts(parallel)
    recorded = _recorded(parallel, layouts)
    last = rank == PROCESSES - 1

    class Raises:
        def __iter__(self) -> Any:
            raise FileNotFoundError("no such file")

    def other(one: RoutedExperts, first: int = 0, **changes: Any) -> RoutedExperts:
        about = {"layers": one.layers, "num_experts": EXPERTS, "recorded": one.recorded} | changes
        ids = one.ids.long()
        ids[first:] = (ids[first:] + 1) % EXPERTS
        return RoutedExperts(ids=ids, **about)

    every = _by_hand(_layouts(ParallelLayout()))
    mine = _recorded(ParallelLayout(pp=2, pp_rank=parallel.pp_rank), every)
    shifted = TokenLayout([0, 1, 2, 4, 5, 6][: len(layouts[0].rows)], LENGTHS[0], layouts[0].fingerprints)
    half = _by_hand(_layouts(ParallelLayout(cp=2)))
    wider = [other(one, num_experts=EXPERTS + 1) for one in recorded]
    cases: dict[str, tuple[Any, Any]] = {
        "other rows": (recorded, [layouts[0], every[1]] if last else layouts),
        "too few layouts": (recorded, layouts[:1] if last else layouts),
        "not routes": ([1, 2] if last else recorded, layouts),
        "an exception": (Raises() if last else recorded, layouts),
        "other batch": (recorded[:1] if last else recorded, layouts[:1] if last else layouts),
        "twins differ": ([other(one, first=1) for one in mine] if last else mine, every),
        "overlap": ([other(mine[0]).take(range(6)), recorded[1]], [shifted, layouts[1]])
        if last
        else (recorded, layouts),
        "hole": (mine if rank < 2 else _recorded(parallel, half), every if rank < 2 else half),
        "not covered": (_recorded(parallel, half), half),
        "other experts": (wider if last else recorded, layouts),
        "nothing": ([without_layers()] * 2, layouts),
    }
    for case, (routes, of) in cases.items():
        tell(case, _raised(lambda: collect(routes, of, parallel)))  # noqa: B023  called at once
    _fail_otherwise(parallel, last, tell)
    partly, all_groups = _recorded(parallel, half), parallel
    tell("not covered, for one rank", _raised(lambda: collect(partly, half, all_groups, everywhere=False)))


def _fail_otherwise(parallel: ParallelLayout, last: bool, tell: Callable[[str, object], None]) -> None:
    from dataclasses import replace
    from unittest import mock

    from npu_replay import DecoderLayers, collect
    from npu_replay.parallel import collect as collecting

    layouts = _layouts(parallel)
    recorded = _recorded(parallel, layouts)
    out_of_memory = mock.Mock(side_effect=MemoryError("MemoryError"))
    swapped = _layouts(replace(parallel, cp_rank=1 - parallel.cp_rank))
    whole = replace(parallel, decoder=DecoderLayers(4, moe_layer_freq=[1, 1, 0, 1]))
    rows_only = replace(whole, groups=parallel.groups[:1])
    tell("a single layout", _raised(lambda: collect(recorded, layouts[0] if last else layouts, parallel)))
    tell("a single route", _raised(lambda: collect(recorded[0] if last else recorded, layouts, parallel)))
    tell("no list", _raised(lambda: collect(recorded, 7 if last else layouts, parallel)))
    with mock.patch.object(collecting.Union, "put", out_of_memory) if last else mock.MagicMock():
        tell("out of memory", _raised(lambda: collect(recorded, layouts, parallel)))
    tell("not everywhere", _raised(lambda: collect(recorded, layouts, parallel, everywhere=not last)))
    tell("another rank's layouts", _raised(lambda: collect(recorded, swapped, parallel)))
    tell("no stages", _raised(lambda: collect(recorded, layouts, rows_only)))
    tell("with its decoder", collect(recorded, layouts, whole) == _sequences())


def _raised(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"error {type(error).__name__} {error}"
    return "nothing was raised"


def _lose_a_rank(parallel: ParallelLayout, rank: int, tell: Callable[[str, object], None]) -> None:
    from npu_replay import collect

    layouts = _layouts(parallel)
    started = time.monotonic()
    if rank == PROCESSES - 1:
        time.sleep(15)  # alive, but elsewhere
        tell("late", "did not come")
    else:
        recorded = _recorded(parallel, layouts)
        tell("late", _raised(lambda: collect(recorded, layouts, parallel, patience=2)))
    tell("late seconds", time.monotonic() - started)
