"""What every stack does in a block, row by row.

Each release of Megatron-core on the path is a stack of its own; ways to route and to recompute, aux losses,
by release: tests/matrix; capacity: tests/compat/megatron/test_routers.py; follow: test_follow.py. A fault in
any of these: test_faults_in_any_micro_batch.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import npu_replay
from npu_replay import MicroBatchError, RoutedExperts, routers
from npu_replay.sessions.replay import StepReplay
from zoo.beds import VOCABULARY, Bed, Map, bed_of
from zoo.outcome import as_map, gradients, hooks, random_routes, same, same_experts

STACKS = ("toy", "Qwen3Moe", "Mixtral", "DeepseekV3", "GptOss", "megatron", "megatron hybrid")
COUNT = 5
"""Micro-batches; number 3 is neither checked nor the last, as most of a job's."""

pytestmark = [
    pytest.mark.usefixtures("toy_routers"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]


over_stacks = pytest.mark.parametrize(
    "stack",
    [pytest.param(name, marks=[pytest.mark.megatron] * ("megatron" in name)) for name in STACKS],
)
over_recomputes = pytest.mark.parametrize("how", [None, "reentrant", "non-reentrant"])


def labels(bed: Bed) -> list[int]:
    return [router.label for router in routers.find([bed.model])[0]]


def tokens(number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(1, VOCABULARY, (1, 5 + number), generator=generator)


def foreign(bed: Bed) -> list[RoutedExperts]:
    rows = [tokens(number).numel() for number in range(COUNT)]
    return random_routes(rows, labels(bed), bed.experts, bed.topk, seed=5)


def run(bed: Bed) -> list[Any]:
    """Losses and gradients; backward begins with the last micro-batch."""
    bed.model.zero_grad()
    losses = [bed.call(tokens(number)) for number in range(COUNT)]
    for loss in losses[::-1]:
        loss.backward()
    return [[loss.detach() for loss in losses], gradients(bed.model)]


@contextmanager
def witnessed(bed: Bed) -> Iterator[list[list[Map]]]:
    """By router and call, which experts each token goes to: the forwards, then their recomputes."""
    used = bed.used or (lambda output: as_map(output[1], bed.experts))
    maps: list[list[Map]] = [[] for _ in bed.routers]
    handles = [
        module.register_forward_hook(lambda _, __, output, seen=seen: seen.append(used(output)))
        for module, seen in zip(bed.routers, maps, strict=True)
    ]
    yield maps
    for handle in handles:
        handle.remove()


def shows(maps: list[list[Map]], bed: Bed, routes: list[RoutedExperts]) -> bool:
    """Did each forward, and each recompute, send the tokens where these routes do?"""
    return all(
        same_experts(routes[number], label, shown)
        for label, calls in zip(labels(bed), maps, strict=True)
        for number, shown in zip([*range(COUNT), *range(COUNT)[::-1]], calls, strict=False)
    )


@over_recomputes
@over_stacks
def test_a_record_changes_nothing_and_has_what_was_used(stack: str, how: str | None) -> None:
    bed = bed_of(stack, how)
    untouched = run(bed)
    with (
        npu_replay.observe(bed.model) as seen,
        npu_replay.record(bed.model) as recording,
        witnessed(bed) as maps,
    ):
        assert same(run(bed), untouched)
    assert npu_replay.compare(seen.shown, recording.routes).differing == 0
    assert {len(calls) for calls in maps} == {COUNT * (1 if how is None else 2)}
    assert shows(maps, bed, recording.routes)
    for block in (npu_replay.replay(bed.model, recording.routes), npu_replay.pin_recompute(bed.model)):
        with block:
            assert same(run(bed), untouched)
    assert hooks(bed.model) == 0


@over_recomputes
@over_stacks
def test_a_replay_uses_the_routes_also_in_recomputes(stack: str, how: str | None) -> None:
    bed = bed_of(stack, how)
    plain = bed_of(stack, None)
    routes = foreign(bed)
    with npu_replay.observe(bed.model) as seen, npu_replay.replay(bed.model, routes), witnessed(bed) as maps:
        replayed = run(bed)
    assert npu_replay.compare(seen.shown, routes).differing == 0
    assert shows(maps, bed, routes)
    with npu_replay.replay(plain.model, routes):
        assert same(run(plain), replayed)
    assert not same(run(plain), replayed)
    assert all(module.weight.grad.abs().sum() > 0 for module in bed.routers)


@over_stacks
def test_errors_wait_for_the_end_of_a_schedule(stack: str) -> None:
    bed = bed_of(stack, None)
    routes = foreign(bed)
    live, _ = run(bed)
    losses = []
    with (
        pytest.raises(MicroBatchError, match=r"micro-batch 1, layer .*another number of tokens"),
        StepReplay(bed.model, errors_wait=True) as session,
    ):
        for number in range(COUNT):
            session.give(0, routes[0 if number == 1 else number])
            losses.append(bed.call(tokens(number)))
    assert len(losses) == COUNT
    assert torch.equal(losses[1], live[1])
