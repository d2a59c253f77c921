"""What every stack does in a block, row by row; what one of them can't do is an expected failure.

Each release of Megatron-core on the path is a stack of its own; ways to route and to recompute, by release:
tests/matrix. A fault in any of these: test_faults_in_any_micro_batch.py.
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
from zoo import beds
from zoo.beds import VOCABULARY, Bed, Map, bed_of
from zoo.outcome import as_map, gradients, hooks, random_routes, same, same_experts

STACKS = ("toy", "Qwen3Moe", "Mixtral", "DeepseekV3", "GptOss", "megatron", "megatron hybrid")
COUNT = 5
"""Micro-batches; number 3 is neither checked nor the last, as most of a job's."""
OF_TRANSFORMERS = "the loss of transformers counts logits: a call with output_router_logits is refused"
NO_ROOM = "its experts have no capacity"
UNABLE = {
    "follow": dict.fromkeys(("megatron", "megatron hybrid"), "its pipelines see no token ids"),
    "aux loss": {"toy": "it has none"} | dict.fromkeys(STACKS[1:5], OF_TRANSFORMERS),
    "capacity": dict.fromkeys(STACKS[:5], NO_ROOM),
}
"""By row, which stack can't, and why."""

pytestmark = [
    pytest.mark.usefixtures("toy_routers"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]


def over_stacks(row: str = "") -> pytest.MarkDecorator:
    def marks(name: str) -> list[pytest.MarkDecorator]:
        why = UNABLE.get(row, {}).get(name)
        return [pytest.mark.megatron] * ("megatron" in name) + [pytest.mark.xfail(reason=why)] * bool(why)

    return pytest.mark.parametrize("stack", [pytest.param(name, marks=marks(name)) for name in STACKS])


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


def shows(maps: list[list[Map]], bed: Bed, routes: list[RoutedExperts], but: int | None = None) -> bool:
    """Did each forward but one, and each recompute, send the tokens where these routes do?"""
    return all(
        number == but or same_experts(routes[number], label, shown)
        for label, calls in zip(labels(bed), maps, strict=True)
        for number, shown in zip([*range(COUNT), *range(COUNT)[::-1]], calls, strict=False)
    )


@over_recomputes
@over_stacks()
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
@over_stacks()
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


@over_stacks("follow")
def test_an_update_follows_what_was_recorded_for_its_tokens(stack: str) -> None:
    bed = bed_of(stack, None)
    kept = [module.weight.detach().clone() for module in bed.routers]
    with npu_replay.follow(bed.model):
        with torch.no_grad(), witnessed(bed) as recorded:
            for number in range(COUNT):
                bed.call(tokens(number))
        for module in bed.routers:
            module.weight.data.neg_()
        with witnessed(bed) as used:
            run(bed)
    assert same(used, recorded)
    for module, weight in zip(bed.routers, kept, strict=True):
        module.weight.data.copy_(weight)


@over_recomputes
@over_stacks()
def test_routes_may_come_one_by_one_and_errors_wait_for_the_end(stack: str, how: str | None) -> None:
    """As a pipeline's schedule has them: all others are replayed, also in their recomputes."""
    bed = bed_of(stack, how)
    routes = foreign(bed)
    live, _ = run(bed)
    with npu_replay.replay(bed.model, routes):
        replayed, _ = run(bed)
    losses = []
    with (
        pytest.raises(MicroBatchError, match=r"micro-batch 1, layer .*another number of tokens"),
        StepReplay(bed.model, errors_wait=True) as session,
        witnessed(bed) as maps,
    ):
        for number in range(COUNT):
            session.give(0, routes[0 if number == 1 else number])
            losses.append(bed.call(tokens(number)))
        for loss in losses[::-1]:
            loss.backward()
    assert same(losses, [live[1] if number == 1 else loss for number, loss in enumerate(replayed)])
    assert shows(maps, bed, routes, but=1)
    assert hooks(bed.model) == 0


def variant(stack: str, name: str) -> Bed:
    if stack == "megatron":
        return beds.megatron_gpt(
            name, num_layers=4
        )  # Megatron keeps losses of so many as the first model has
    if stack == "megatron hybrid":
        from zoo.gpt import VARIANTS

        return beds.megatron_hybrid(**VARIANTS[name])
    return bed_of(stack, None)


@over_stacks("aux loss")
def test_an_aux_loss_counts_the_experts_that_are_asked_for(stack: str) -> None:
    bed = variant(stack, "aux_loss")
    routes = foreign(bed)
    results = []
    for asked in ("live", "replayed"):
        with npu_replay.replay(bed.model, routes, aux_loss=asked):  # type: ignore[arg-type]
            results.append(run(bed))
    assert not same(*results)


@over_stacks("capacity")
def test_tokens_over_an_experts_capacity_are_dropped_as_in_the_record(stack: str) -> None:
    bed = variant(stack, "capacity_probs")
    untouched = run(bed)
    with npu_replay.record(bed.model) as recording:
        run(bed)
    with npu_replay.replay(bed.model, recording.routes) as session:
        assert same(run(bed), untouched)
    assert 0 < session.metrics()["capacity_dropped"] < 1
