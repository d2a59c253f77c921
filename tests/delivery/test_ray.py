"""Ray's object store as the carrier, on a real Ray: two nodes with a store each, 16 ranks of a training."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from memory import own_memory
from npu_replay import ReplayError, delivery
from npu_replay.compat.ray import RayCarrier
from npu_replay.delivery.plan import plan

ray = pytest.importorskip("ray", reason="Ray isn't installed: pip install ray")
if TYPE_CHECKING:
    import ray_cluster
else:
    ray_cluster = pytest.importorskip("ray_cluster")
WHOLE, made, digest = ray_cluster.WHOLE, ray_cluster.made, ray_cluster.digest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
TOKENS, SAMPLES = 8192, 16


@pytest.fixture(scope="module")
def machine() -> Iterator[Any]:
    with ray_cluster.machine() as running:
        yield running


@pytest.fixture(scope="module")
def putters(machine: Any) -> list[Any]:
    return [machine.on(node, ray_cluster.Putter) for node in "ab"]


def put(putters: list[Any], first: int, tokens: int = TOKENS, samples: int = SAMPLES) -> list[Any]:
    """References of samples from this seed on: each putter has every second."""
    seeds = range(first, first + samples)
    parts = ray.get(
        [one.put.remote(list(seeds[n :: len(putters)]), tokens) for n, one in enumerate(putters)], timeout=60
    )
    return [one for pair in zip(*parts, strict=True) for one in pair]


def stage(pp: int) -> range:
    return range(12 * pp, 12 * pp + 12)


def shares(references: list[Any]) -> list[Any]:
    half = len(references) // 2
    return [references[:half], references[half:]]


def test_without_a_started_ray_it_is_said() -> None:
    with pytest.raises(ReplayError, match=r"no Ray to put routes into.* a Ray that isn't started here"):
        RayCarrier().put(made(0, 2))


def test_each_rank_gets_its_own_and_each_id_crosses_once(machine: Any, putters: list[Any]) -> None:
    """A stage's samples lie half on its own node, half on the other, which is what has to cross."""
    before, crossed = machine.resident(), []
    unique = SAMPLES * TOKENS * 48 * 8
    planned = plan(WHOLE, [TOKENS] * SAMPLES, topk=8, num_experts=128)
    assert planned.unique == unique
    assert planned.once.sent == planned.once.busiest * 2 == unique // 2 + 2 * SAMPLES * TOKENS
    for number in range(3):  # others are on the loopback too: the least counts
        references = put(putters, 100 * number)
        counted = ray_cluster.loopback()
        got = machine.fetched(shares(references))
        crossed.append(ray_cluster.loopback() - counted)
        for found, (pp, dp) in zip(got, machine.places, strict=True):
            seeds = range(100 * number + 8 * dp, 100 * number + 8 * dp + 8)
            assert found == [digest(made(seed, TOKENS).only(stage(pp))) for seed in seeds]
        if not number:
            share = unique // 2 + unique // 4  # what it put, and what it was sent
            for node, bytes_there in machine.resident().items():
                assert share < bytes_there - before[node] < 1.2 * share
        machine.drop()
        del references, got
    assert unique // 2 < min(crossed) < 1.05 * unique // 2, crossed
    assert machine.settled(lambda held: not any(held.values())) == {"a": 0, "b": 0}


def test_references_travel_with_ray_as_anything_does(machine: Any, putters: list[Any]) -> None:
    """Through another worker, split, reordered, repeated; the driver's own are gone meanwhile."""
    references = put(putters, 1000, tokens=50, samples=8)
    order = [7, 0, 3, 3, 5, 0]
    moved = ray.get(putters[0].passed_on.remote(references, order))
    del references
    place = [0, 1, 3, 4, 6, 7, 2, 5]
    wanted = [made(1000 + place[at], 50) for at in order]
    for found, (pp, _) in zip(machine.fetched([moved, moved]), machine.places, strict=True):
        assert found == [digest(one.only(stage(pp))) for one in wanted]
    assert delivery.fetch(moved, layers=(3, 40)) == [one.only((3, 40)) for one in wanted]
    machine.drop()


def assert_lost(found: list[Any], number: int, seconds: float) -> None:
    """Every rank of this share says which sample is lost, in time."""
    for said, spent in found:
        assert f"sample {number}, Reference(" in said
        assert "the routes of this sample can't be read" in said
        assert "died" in said or "Lost" in said, said
        assert spent < seconds


def test_a_putter_that_dies_is_told_by_every_rank_and_the_next_step_works(
    machine: Any, putters: list[Any]
) -> None:
    doomed = machine.on("b", ray_cluster.Putter)
    alive, lost = put(putters, 2000, 200, 4), put([doomed], 3000, 200, 2)
    ray.kill(doomed)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(doomed.put.remote([], 1), timeout=20)
    time.sleep(2)  # the nodes hear of it after the driver
    got = machine.fetched([[*alive, *lost]] * 2)
    assert_lost(got[:8], number=4, seconds=10)
    wanted = [made(seed, 200) for seed in (2000, 2001, 2002, 2003, 3000, 3001)]
    for found, (pp, _) in zip(got[8:], machine.places[8:], strict=True):
        if isinstance(found, tuple):
            assert_lost([found], number=4, seconds=10)
        else:  # its own store has the objects yet
            assert found == [digest(one.only(stage(pp))) for one in wanted]
    begun = time.monotonic()
    got = delivery.fetch([*lost, *alive], on_bad_route="native")
    assert got == [None, None, *(made(seed, 200) for seed in range(2000, 2004))]
    assert time.monotonic() - begun < 10
    again = put(putters, 4000, 200, 4)
    assert machine.fetched(shares(again))[15] == [digest(made(s, 200).only(stage(3))) for s in (4002, 4003)]
    machine.drop()


def test_a_node_that_is_lost_is_told_by_every_rank_and_the_next_step_works(
    machine: Any, putters: list[Any]
) -> None:
    with machine.added("c") as lose:
        lost = put([machine.on("c", ray_cluster.Putter)], 5000, 200, 2)
        alive = put(putters, 6000, 200, 2)
        lose()
        assert_lost(machine.fetched([[alive[0], lost[0], alive[1]]] * 2, patience=20), number=1, seconds=25)
    again = put(putters, 7000, 200, 4)
    assert machine.fetched(shares(again))[0] == [digest(made(s, 200).only(stage(0))) for s in (7000, 7001)]
    machine.drop()


def test_a_thousand_steps_leave_nothing(machine: Any, putters: list[Any]) -> None:
    machine.drop()
    ranks, sizes, stores = [machine.ranks[0], machine.ranks[15]], [], []
    for number in range(1000):
        references = put(putters[number % 2 :][:1], 8000 + number, 20, 1)
        got = ray.get(ranks[number // 2 % 2].fetch.remote(references))
        assert [one[0] for one in got] == [8000 + number]
        if number % 100 == 99:
            sizes.append(own_memory())
            stores.append(machine.resident())
    del references, got
    assert max(sizes[4:]) - sizes[3] < 4 * 2**20, sizes
    assert stores[9] == stores[3]
    machine.drop()
    assert machine.settled(lambda held: not any(held.values())) == {"a": 0, "b": 0}
