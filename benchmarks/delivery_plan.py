"""plan: what a step's routes cost each rank, node and link, worked out before a job runs.

Ranks are numbered as Megatron-core does by default, tp-cp-dp-pp: those of one stage and one data-parallel
share stand side by side. Such a group is a class: its ranks read and hold the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from npu_replay.errors import ReplayError, shown, whole_number
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.routes.checks import Array
from npu_replay.routes.routed_experts import narrow_array_dtype

DISPATCHES = 3
"""Calls of verl's that carry the batch to the ranks: old log-probs, reference, update."""
MARKS = 2
"""Bytes a token of verl's batches under NPU_REPLAY_DELIVERY, in two dispatches: the reference has none."""
_INT16 = 2


@dataclass(frozen=True)
class Load:
    """What one way costs in a step, in bytes.

    Attributes:
        way: its name.
        reads: objects that a rank reads, int64 [pp, dp]; ranks of one stage and share are alike.
        read: bytes in them.
        own: bytes that a rank holds by itself, the same shape; what it reads out of its node's store isn't.
        node_read: bytes that come to each node, int64 [nodes]; ranks of a node share what they read.
        node_held: bytes that each holds meanwhile: in its store, and its ranks by themselves.
        senders: nodes that send, each an equal part.
        put_held: bytes that each sender holds.
        collected: bytes that come to the driver before anything is sent.
        apart: are the senders other nodes than those that read? If not they are the first of them.
    """

    way: str
    reads: Array
    read: Array
    own: Array
    node_read: Array
    node_held: Array
    senders: int
    put_held: int
    collected: int
    apart: bool

    def link(self, source: int, target: int) -> int:
        """Bytes from one sender to one node that reads."""
        if source == target and not self.apart:
            return 0
        return int(self.node_read[target]) // self.senders if 0 <= source < self.senders else 0

    @property
    def sent(self) -> int:
        """Bytes between nodes, the driver's collecting aside."""
        every = int(self.node_read.sum())
        return every if self.apart else every - int(self.node_read[: self.senders].sum()) // self.senders

    @property
    def busiest(self) -> int:
        """Bytes out of the node that sends most."""
        every = int(self.node_read.sum())
        at_home = 0 if self.apart else int(self.node_read[: self.senders].min())
        return (every - at_home) // self.senders


@dataclass(frozen=True)
class Plan:
    """What a step's routes cost, by each way.

    Attributes:
        ranks, nodes: of the training.
        tokens: of all samples.
        unique: bytes of the ids that routers replay, each once.
        today: as verl does by itself: int16, padded, all layers, to every rank, in each dispatch.
        whole: one object a sample with all its layers, fetched once.
        once: a piece of each sample for each pipeline rank, fetched once.
        marks: what verl's batches carry beside it under NPU_REPLAY_DELIVERY; a loop of one's own has none.
    """

    ranks: int
    nodes: int
    tokens: int
    unique: int
    today: Load
    whole: Load
    once: Load
    marks: Load

    @property
    def loads(self) -> tuple[Load, ...]:
        """All ways, in the order of the table."""
        return self.today, self.whole, self.once


def plan(
    parallel: ParallelLayout,
    lengths: Sequence[int],
    *,
    topk: int,
    num_experts: int,
    ranks_a_node: int = 8,
    rollout_nodes: int | None = None,
    padded: int | None = None,
) -> Plan:
    """Work out what a step's routes cost.

    >>> from benchmarks.delivery_plan import plan
    >>> layout = npu_replay.ParallelLayout(tp=4, cp=2, pp=2, dp=2, decoder=npu_replay.DecoderLayers(48))
    >>> found = plan(layout, [8192] * 64, topk=8, num_experts=128)
    >>> found.ranks, found.nodes, found.unique, found.today.sent // found.unique, found.once.reads.max()
    (32, 4, 201326592, 9, np.int64(32))

    Args:
        parallel: sizes of the training, with `decoder`; which rank it is doesn't matter.
        lengths: tokens of each sample of a step. Shares of dp are neighbours, as even as can be.
        topk, num_experts: of the model.
        ranks_a_node: neighbours that share a node's store.
        rollout_nodes: nodes of their own that samples end on, an equal part on each; None where they end on
            the nodes of the training.
        padded: what today's way pads each sample to; the longest, if not given.

    Raises:
        ReplayError: no decoder, no samples, a number below 1, samples longer than what they are padded to.
    """
    parallel._known_decoder()
    sizes = np.array(list(lengths))
    fine = sizes.dtype.kind in "iu" and sizes.ndim == 1 and len(sizes) > 0 and sizes.min() > 0
    ReplayError.unless(fine, "these are no lengths of samples", "whole numbers from 1 on", shown(lengths))
    topk = whole_number(topk, "topk", least=1)
    longest = int(sizes.max()) if padded is None else whole_number(padded, "padded", least=1)
    problem = "a sample is longer than what the batch is padded to"
    ReplayError.unless(longest >= sizes.max(), problem, f"at least {sizes.max()}", longest)
    size = narrow_array_dtype(whole_number(num_experts, "num_experts", least=1)).itemsize
    grid = _Grid(parallel, whole_number(ranks_a_node, "ranks_a_node", least=1))
    ends = np.arange(parallel.dp + 1) * len(sizes) // parallel.dp
    samples, tokens = np.diff(ends), np.diff(_sums(sizes)[ends])
    moe = np.array([len(replace(parallel, pp_rank=rank).moe_layers) for rank in range(parallel.pp)])
    apart = rollout_nodes is not None
    homes = grid.nodes if rollout_nodes is None else whole_number(rollout_nodes, "rollout_nodes", least=1)
    every = np.ones((parallel.pp, 1), np.int64)

    def dispatched(way: str, a_token: int, calls: int) -> Load:
        """Padded batches that the driver sends to every rank."""
        batch = samples * longest * a_token
        chunks = every * batch
        arrives = grid.shares(batch)
        return Load(
            way=way,
            reads=calls * np.ones_like(chunks),
            read=calls * chunks,
            own=chunks,
            node_read=calls * arrives,
            node_held=arrives + grid.own(chunks),
            senders=1,
            put_held=2 * int(batch.sum()),  # the driver's batch, and the objects that it makes of it
            collected=int(batch.sum()),
            apart=apart,
        )

    def shared(way: str, reads: Array, read: Array, arrives: Array, held: Array) -> Load:
        """Objects of the store's, of which each node has one copy and no rank one of its own."""
        none = np.zeros_like(read)
        put = -(-int(held.sum()) // homes)
        return Load(way, reads, read, none, arrives, arrives, homes, put, 0, apart)

    objects = tokens * (int(moe.sum()) * topk * size + 1)  # a byte a token says whether it has a route
    pieces = np.where(moe[:, None] > 0, tokens * (moe[:, None] * topk * size + 1), 0)
    counts = np.where(moe[:, None] > 0, every * samples, 0)
    return Plan(
        ranks=grid.ranks,
        nodes=grid.nodes,
        tokens=int(sizes.sum()),
        unique=int(sizes.sum() * moe.sum()) * topk * size,
        today=dispatched("verl by itself", parallel._known_decoder().count * topk * _INT16, DISPATCHES),
        whole=shared("whole objects", every * samples, every * objects, grid.shares(objects), objects),
        once=shared("each id once", counts, pieces, grid.cells(pieces), pieces),
        marks=dispatched("marks", MARKS, DISPATCHES - 1),
    )


class _Grid:
    """Which groups of ranks, [pp, dp] in a row, lie on which node."""

    def __init__(self, parallel: ParallelLayout, ranks_a_node: int) -> None:
        self._group = parallel.tp * parallel.cp
        self._dp = parallel.dp
        self.ranks = self._group * parallel.dp * parallel.pp
        self.nodes = -(-self.ranks // ranks_a_node)
        first = np.arange(self.nodes) * ranks_a_node
        self._ranks = first, np.minimum(first + ranks_a_node, self.ranks)
        self._groups = self._ranks[0] // self._group, -(-self._ranks[1] // self._group)

    def cells(self, amounts: Array) -> Array:
        """What comes to each node if each group needs an amount of its own, [pp, dp]."""
        (first, end) = self._groups
        sums = _sums(amounts.reshape(-1))
        needed: Array = sums[end] - sums[first]
        return needed

    def shares(self, amounts: Array) -> Array:
        """The same if groups of all stages need that of their share, [dp]."""
        first, end = self._groups
        start = first % self._dp
        sums = _sums(np.tile(amounts, 2))
        needed: Array = sums[start + np.minimum(end - first, self._dp)] - sums[start]
        return needed

    def own(self, amounts: Array) -> Array:
        """The same if each rank needs its own, [pp, dp]."""
        flat = np.append(amounts.reshape(-1), 0)
        sums = _sums(amounts.reshape(-1)) * self._group
        whole, more = np.divmod(np.array(self._ranks), self._group)
        held: Array = np.diff(sums[whole] + more * flat[whole], axis=0)[0]
        return held


def _sums(amounts: Array) -> Array:
    return np.concatenate([[0], np.cumsum(amounts)])
