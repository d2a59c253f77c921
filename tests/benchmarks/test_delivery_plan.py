"""The planner, held against a count of every rank's ids one by one, and against worked-out figures."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import pytest

from benchmarks.delivery_plan import Plan, plan
from npu_replay import DecoderLayers, ParallelLayout, ReplayError

QWEN3_235B = DecoderLayers(94, first_stage=11, last_stage=11)
LARGE = ParallelLayout(tp=4, cp=2, pp=8, dp=4, decoder=QWEN3_235B)


def test_the_figures_of_a_large_job() -> None:
    """94 layers, top-8, 512 x 16 samples of 8k tokens, 256 ranks, 8 a node: worked out by hand."""
    found = plan(LARGE, [8192] * 8192, topk=8, num_experts=128, rollout_nodes=32)
    assert (found.ranks, found.nodes) == (256, 32)
    assert found.unique == 94 * 8 * 8192 * 8192 == 50_465_865_728
    # A quarter of the batch, twice the bytes, to each of 32 nodes, three times.
    assert found.today.sent == 3 * 32 * 2 * found.unique // 4
    assert round(found.today.sent / 3e9) == 807
    assert 8 * found.today.own.max() == 4 * found.unique  # 202 GB; its store has a ninth copy
    assert found.today.node_held.max() == 9 * found.unique // 2
    flags = 8192 * 8192
    assert found.whole.sent == 8 * (found.unique + flags)
    assert found.once.sent == found.unique + 8 * flags
    assert found.once.node_held.max() == 12 * found.unique // 94 // 4 + flags // 4
    assert found.once.reads.max() == 8192 // 4
    # The marks in verl's batches: two bytes a token, a quarter of them to each node, twice.
    assert found.marks.collected == 2 * flags
    assert found.marks.sent == 2 * 32 * 2 * flags // 4


SMALL = [
    ({"tp": 2, "cp": 2, "pp": 2, "dp": 2}, DecoderLayers(6), 8),
    ({"tp": 2, "pp": 4, "dp": 2}, DecoderLayers(8), 8),  # a node has both shares of two stages
    ({"tp": 8, "cp": 2, "pp": 2, "dp": 3}, DecoderLayers(4), 8),  # a group lies on two nodes
    ({"tp": 3, "pp": 2, "dp": 3, "vp": 2}, DecoderLayers(8), 4),  # groups and nodes overlap
    ({"tp": 1, "pp": 3, "dp": 5}, DecoderLayers(9, moe_layer_freq=[0] * 3 + [1] * 6), 4),  # a dense stage
    ({"dp": 3}, DecoderLayers(2), 2),
    ({"tp": 2, "pp": 2}, DecoderLayers(2), 100),
]


@pytest.mark.parametrize("rollout_nodes", [None, 3])
@pytest.mark.parametrize(("sizes", "decoder", "node"), SMALL)
def test_it_says_what_counting_every_rank_says(
    sizes: dict[str, int], decoder: DecoderLayers, node: int, rollout_nodes: int | None
) -> None:
    parallel = ParallelLayout(**sizes, decoder=decoder)
    lengths = [5 + 3 * (number % 7) for number in range(4 * parallel.dp + 1)]
    found = plan(
        parallel,
        lengths,
        topk=3,
        num_experts=300,
        ranks_a_node=node,
        rollout_nodes=rollout_nodes,
        padded=30,
    )
    counted = Counted(parallel, decoder, lengths, node)
    assert found.unique == sum(lengths) * len(decoder.moe) * 3 * 2
    for load, way in zip(found.loads, ("today", "whole", "once"), strict=True):
        dispatches = 3 if way == "today" else 1
        nodes = counted.node_bytes(way)
        assert load.node_read.tolist() == [dispatches * one for one in nodes]
        for rank, (pp, dp) in enumerate(counted.places):
            assert load.read[pp, dp] == dispatches * sum(counted.objects(way, rank).values())
        own = counted.own_bytes() if way == "today" else [0] * len(nodes)
        assert load.node_held.tolist() == [one + more for one, more in zip(nodes, own, strict=True)]
        senders = 1 if way == "today" else rollout_nodes or len(nodes)
        assert load.senders == senders
        links = sum(load.link(a, b) for a, b in itertools.product(range(senders), range(len(nodes))))
        assert abs(links - load.sent) <= senders * len(nodes)  # a link's bytes are rounded down
        assert load.busiest <= load.sent <= load.busiest * senders + senders
    assert found.once.reads.max() == max(map(len, counted.shares))


class Counted:
    """The same job, rank by rank: which objects each reads, and how large they are."""

    def __init__(
        self, parallel: ParallelLayout, decoder: DecoderLayers, lengths: list[int], node: int
    ) -> None:
        self.parallel = parallel
        self.decoder = decoder
        self.lengths = lengths
        self.node = node
        cuts = [rank * len(lengths) // parallel.dp for rank in range(parallel.dp + 1)]
        self.shares = [list(range(first, end)) for first, end in itertools.pairwise(cuts)]
        group = range(parallel.tp * parallel.cp)
        self.places = [(pp, dp) for pp in range(parallel.pp) for dp in range(parallel.dp) for _ in group]

    def objects(self, way: str, rank: int) -> dict[Any, int]:
        pp, dp = self.places[rank]
        here = ParallelLayout(pp=self.parallel.pp, vp=self.parallel.vp, pp_rank=pp, decoder=self.decoder)
        if way == "today":
            return {dp: len(self.shares[dp]) * 30 * self.decoder.count * 3 * 2}
        layers = self.decoder.moe if way == "whole" else here.moe_layers
        wide = len(layers) * 3 * 2 + 1
        return {(one, layers): self.lengths[one] * wide for one in self.shares[dp] if layers}

    def _nodes(self) -> list[range]:
        ranks = len(self.places)
        return [range(first, min(first + self.node, ranks)) for first in range(0, ranks, self.node)]

    def node_bytes(self, way: str) -> list[int]:
        shared: list[dict[Any, int]] = [{} for _ in self._nodes()]
        for store, ranks in zip(shared, self._nodes(), strict=True):
            for rank in ranks:
                store |= self.objects(way, rank)
        return [sum(store.values()) for store in shared]

    def own_bytes(self) -> list[int]:
        return [sum(sum(self.objects("today", rank).values()) for rank in ranks) for ranks in self._nodes()]


def test_a_node_of_the_training_sends_itself_nothing() -> None:
    found = plan(LARGE, [8192] * 8192, topk=8, num_experts=128)
    once = found.once
    assert (once.link(3, 3), once.link(3, 4)) == (0, int(once.node_read[4]) // 32)
    assert once.sent == pytest.approx(31 / 32 * once.node_read.sum())
    assert found.today.sent == 3 * 31 * 2 * found.unique // 4
    alone = plan(ParallelLayout(tp=8, decoder=DecoderLayers(4)), [9], topk=2, num_experts=8)
    assert [load.sent for load in alone.loads] == [0, 0, 0]


def test_its_work_does_not_grow_with_the_ranks() -> None:
    """Calls are counted, since seconds say how busy the machine is."""
    calls: list[int] = []

    def planned(dp: int) -> Plan:
        parallel = ParallelLayout(tp=4, pp=2, dp=dp, decoder=DecoderLayers(48))
        calls.append(0)

        def count(*_: object) -> None:
            calls[-1] += 1

        sys.setprofile(count)
        try:
            return plan(parallel, [8192] * 65_536, topk=8, num_experts=128)
        finally:
            sys.setprofile(None)

    for dp in (1, 64, 2048):
        found = planned(dp)
        assert found.ranks == 8 * dp
        assert found.once.node_read.sum() == found.unique + 2 * found.tokens
    assert max(calls) < 10 * min(calls), calls


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"parallel": ParallelLayout()}, "decoder layers"),
        ({"lengths": []}, "no lengths of samples"),
        ({"lengths": [5, 0]}, "no lengths of samples"),
        ({"lengths": [5.5]}, "no lengths of samples"),
        ({"padded": 4}, "longer than what the batch is padded to"),
        ({"topk": 0}, "topk"),
        ({"ranks_a_node": 0}, "ranks_a_node"),
        ({"rollout_nodes": 0}, "rollout_nodes"),
    ],
)
def test_numbers_that_are_none(changed: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {"parallel": LARGE, "lengths": [5], "topk": 8, "num_experts": 128}
    given |= changed
    with pytest.raises(ReplayError, match=message):
        plan(given.pop("parallel"), given.pop("lengths"), **given)
