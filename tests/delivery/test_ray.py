"""Ray's object store as the carrier, on a real Ray: two nodes with a store each, 4 ranks of a training.

ci/verl.sh runs it, whose environment has Ray; `pytest -s` prints the figures of docs/dev/performance.md.
"""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from npu_replay import ReplayError, delivery
from npu_replay.compat.ray import RayCarrier

ray = pytest.importorskip("ray", reason="Ray isn't installed: pip install ray")
if TYPE_CHECKING:
    import ray_cluster
else:
    ray_cluster = pytest.importorskip("ray_cluster")
made = ray_cluster.made
digest = ray_cluster.digest

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]
TOKENS = 8192
SAMPLES = 16
PATIENCE = 20.0  # where something is lost


@pytest.fixture(scope="module")
def machine() -> Iterator[Any]:
    with ray_cluster.machine() as running:
        yield running


@pytest.fixture(scope="module")
def putters(machine: Any) -> list[Any]:
    started = [machine.on(node, ray_cluster.Putter) for node in "ab"]
    ray.get([putter.__ray_ready__.remote() for putter in started], timeout=ray_cluster.STARTED_AFTER)
    return started


def put(putters: list[Any], first: int, tokens: int = TOKENS, samples: int = SAMPLES) -> list[Any]:
    """References of samples from this seed on: each putter has every second."""
    seeds = range(first, first + samples)
    parts = ray.get(
        [putter.put.remote(list(seeds[n :: len(putters)]), tokens) for n, putter in enumerate(putters)],
        timeout=60,
    )
    return [reference for pair in zip(*parts, strict=True) for reference in pair]


def stage(pp: int) -> range:
    return range(24 * pp, 24 * pp + 24)


def test_without_a_started_ray_it_is_said() -> None:
    with pytest.raises(ReplayError, match=r"no Ray to put routes into.* a Ray that isn't started here"):
        RayCarrier().put(made(0, 2))


def test_each_rank_gets_its_own_and_each_id_crosses_once(machine: Any, putters: list[Any]) -> None:
    """A stage's samples lie half on its own node, half on the other, which is what has to cross."""
    before = machine.resident()
    unique = SAMPLES * TOKENS * 48 * 8
    references = put(putters, 0)
    there = machine.resident()
    got = machine.fetched(references)
    after = machine.resident()
    for fetched, pp in zip(got, machine.stages, strict=True):
        assert fetched == [digest(made(seed, TOKENS).only(stage(pp))) for seed in range(SAMPLES)]
    share = unique // 2 + unique // 4  # what it put, and what it was sent
    crossed = sum(after.values()) - sum(there.values())  # a copy stays in the asking node's store
    assert unique // 2 <= crossed < 1.05 * unique // 2
    most = {node: after[node] - before[node] for node in after}
    assert share < min(most.values()) <= max(most.values()) < 1.05 * share
    at_most = max(most.values())
    print(f"\na node's store at most {at_most / 1e6:.1f} MB, {at_most / share:.2f} x its share")
    print(f"a reference {len(pickle.dumps(references)) / len(references):.0f} bytes")
    print(f"copies from the other {crossed / 1e6:.1f} MB, {2 * crossed / unique:.3f} x the ids that cross")
    machine.drop()
    del references, got
    assert machine.settled(lambda counts: not any(counts.values())) == {"a": 0, "b": 0}


def test_references_travel_with_ray_as_anything_does(machine: Any, putters: list[Any]) -> None:
    """Through another worker, split, reordered, repeated; the driver's own are gone meanwhile."""
    references = put(putters, 1000, tokens=50, samples=8)
    order = [7, 0, 3, 3, 5, 0]
    moved = ray.get(putters[0].passed_on.remote(references, order))
    del references
    place = [0, 1, 3, 4, 6, 7, 2, 5]
    wanted = [made(1000 + place[at], 50) for at in order]
    for fetched, pp in zip(machine.fetched(moved), machine.stages, strict=True):
        assert fetched == [digest(sample.only(stage(pp))) for sample in wanted]
    assert delivery.fetch(moved, layers=(3, 40)) == [sample.only((3, 40)) for sample in wanted]
    machine.drop()


def assert_lost(answers: list[Any], number: int, seconds: float) -> None:
    """Every rank says which sample is lost, in time."""
    for text, spent in answers:
        assert f"sample {number}, Reference(" in text
        assert "the routes of this sample can't be read" in text
        assert "died" in text or "Lost" in text, text
        assert spent < seconds


def test_a_node_that_is_lost_is_told_by_every_rank_and_the_next_step_works(
    machine: Any, putters: list[Any]
) -> None:
    with machine.added("c") as lose:
        lost = put([machine.on("c", ray_cluster.Putter)], 5000, 200, 2)
        alive = put(putters, 6000, 200, 2)
        lose()
        assert_lost(machine.fetched([alive[0], lost[0], alive[1]], PATIENCE), number=1, seconds=25)
    again = put(putters, 7000, 200, 2)
    assert machine.fetched(again)[0] == [digest(made(s, 200).only(stage(0))) for s in (7000, 7001)]
    machine.drop()


ROUTES = """
import torch, npu_replay
def routes_of(seed):
    ids = torch.rand(9 + seed, 4, 8, generator=torch.Generator().manual_seed(seed)).topk(2).indices
    return npu_replay.RoutedExperts(ids=ids, layers=range(4), num_experts=8)
"""


def test_the_loop_of_the_page_gives_back_what_was_put(tmp_path: Path) -> None:
    """Of docs/delivery.md, which starts a Ray of its own."""
    page = Path(__file__).parents[2] / "docs" / "delivery.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = (block for block in blocks if "import ray" in block)
    script = tmp_path / "loop.py"
    check = """
for pp_rank, rows in enumerate(stages):
    layers = (2 * pp_rank, 2 * pp_rank + 1)
    wanted = npu_replay.RoutedExperts.concat([routes_of(seed).only(layers) for seed in range(4)])
    assert rows.ids.equal(wanted.ids), rows
print("right")
"""
    script.write_text(ROUTES + block + check)
    known = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    # A socket's path may not be long.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        done = subprocess.run(
            [sys.executable, script],
            env=known | {"RAY_TMPDIR": folder, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.stdout.splitlines()[-1:] == ["right"], done.stderr
