"""Moves routes between ranks: `collect` merges what all recorded, `exchange` sends what one rank lacks.

Every rank has what its routers saw: some rows (sequence and context parallelism) of some layers (pipeline
stages). Ranks first exchange what each has. A rank with an error carries it through every group, so that all
ranks leave together. Then each block of rows and layers is sent once, as bytes, since back ends lack narrow
integers, in pieces that go straight into the result. `exchange` sends whole sequences.
"""

from __future__ import annotations

import pickle
from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from npu_replay.errors import MicroBatchError, ReplayError, list_of, micro_batch
from npu_replay.parallel.merge import Block, Part, Union
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.parallel.rank_failures import PATIENCE, Outcome, RankGroup
from npu_replay.parallel.token_layout import TokenLayout
from npu_replay.routes.inputs import Called, find_other_order
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.sessions.record import Recording

PIECE = 1 << 24
"""The bytes that are sent at once: a rank needs no more memory than this beside the result."""

Groups: TypeAlias = "ParallelLayout | dist.ProcessGroup | Sequence[dist.ProcessGroup]"
Blocks: TypeAlias = "list[Block | None]"
"""The block that a rank has of each micro-batch; None without MoE layers."""

_PROBLEM = "a rank of the group didn't come to collect(), or is gone"
_CAUSE = (
    "an exception before collect() on that rank or on one that it waits for in turn (see its log), or ranks "
    "that are further apart in time than `patience`"
)


def collect(
    routes: Recording | Sequence[RoutedExperts],
    layouts: Sequence[TokenLayout],
    groups: Groups = (),
    *,
    everywhere: bool = True,
    patience: float = 20.0,
    error: ReplayError | None = None,
) -> list[RoutedExperts] | None:
    """Merge what the ranks of `groups` recorded into one RoutedExperts per sequence.

        with npu_replay.record(chunks) as recording:
            forward_backward_func(..., forward_only=True)
        sequences = npu_replay.collect(recording, layouts, ParallelLayout.from_megatron(chunks))

    Every rank of the groups must call it, even one without any MoE layer. A single rank undoes its layout:

    >>> layout = npu_replay.TokenLayout.padded([2, 1])
    >>> ids = torch.tensor([0, 2, 1, 7]).view(4, 1, 1)
    >>> rows = npu_replay.RoutedExperts(ids=ids, layers=[0], num_experts=8)
    >>> found = npu_replay.collect([rows], [layout])
    >>> [one.ids.flatten().tolist() for one in found]
    [[0, 1], [2]]

    Args:
        routes: this rank's recording, or its `routes`: one RoutedExperts per micro-batch.
        layouts: this rank's TokenLayout of each micro-batch.
        groups: a ParallelLayout that was read from a running framework; or process groups, which are merged
            over one after the other: first the ranks that share a pipeline stage, then the stages. Left
            out: this process alone.
        everywhere: every rank gets the result; if False only the first rank of the groups, the others None.
        patience: seconds to wait for a rank that is late; twice that in a second group, whose ranks may wait
            in a first one. Give more if ranks may be further apart (one writes a checkpoint): a group whose
            wait ran out can't be used any more.
        error: the reason why this rank has nothing to give; all ranks then leave with it.

    Returns:
        The sequences of all micro-batches in order, with all rows and layers that the ranks have, and the
        layouts' fingerprints.

    Raises:
        ReplayError: on every rank, if any rank's arguments don't fit, a token was recorded by no rank, or
            by two in different ways; or if a rank didn't come.
    """
    # A rank whose wait ran out in one group comes late to the next and reports it there, so later groups wait
    # longer.
    each_group = [
        RankGroup(group, patience * number, _PROBLEM, _CAUSE)
        for number, group in enumerate(_process_groups(groups), start=1)
    ]
    outcome = Outcome()
    outcome.error = error
    layouts, blocks = outcome.attempt(_given, routes, layouts, groups) or ([], [])
    for peers in each_group:
        blocks = _exchanged(peers, outcome, blocks, layouts, everywhere)
    merged = None
    if everywhere or all(peers.me == 0 for peers in each_group):
        merged = outcome.attempt(_sequences, blocks, layouts, groups)
    for peers in each_group:  # no rank returns before all ranks have their result
        peers.patience += patience * len(each_group)
        outcome.agree(peers)
    if outcome.error is not None:
        raise outcome.error
    return merged


class _Offer(NamedTuple):
    """Describes what a rank has, before anything is sent."""

    everywhere: bool
    batches: list[object]  # the lengths and fingerprints of each micro-batch
    parts: list[Part | None]  # what it has of each; None without MoE layers


def _process_groups(groups: Groups) -> list[Any]:
    """Return the process groups of more than one rank."""
    if isinstance(groups, ParallelLayout):
        ReplayError.unless(
            bool(groups.groups) or groups.tp * groups.cp * groups.pp == 1,
            "this ParallelLayout has no process groups to collect over",
            expected="ParallelLayout.from_megatron(model), or groups=(...) beside the numbers",
            got=f"tp={groups.tp}, cp={groups.cp}, pp={groups.pp} given by hand",
        )
        groups = groups.groups
    process_groups: list[Any] = list(groups) if isinstance(groups, Iterable) else [groups]
    for group in process_groups:
        ReplayError.unless(
            dist.get_rank(group) >= 0, "this rank isn't in the group", "a group of this rank", group
        )
    return [group for group in process_groups if dist.get_world_size(group) > 1]


def _given(routes: Any, layouts: Any, groups: Groups) -> tuple[list[TokenLayout], Blocks]:
    """Return the layouts, if they were made for this rank, and what it recorded, without its padding."""
    made = list_of(layouts, TokenLayout, "layouts", kind=MicroBatchError)
    for number, layout in enumerate(made):
        made_for = layout.parallel
        if isinstance(groups, ParallelLayout) and made_for is not None:
            here, there = (
                f"cp {cut.cp}, rank {cut.cp_rank}; rows in {cut.slices_rows} slices, tp rank {cut.tp_rank}"
                for cut in (groups, made_for)
            )
            if made_for.cut != groups.cut:
                raise MicroBatchError(
                    "the layout was made for another rank",
                    where=micro_batch(number),
                    expected=here,
                    got=there,
                    cause="the layouts of another rank, or a ParallelLayout that was changed in between",
                )
    of_micro_batches = routes.routes if isinstance(routes, Recording) else routes
    recorded = list_of(of_micro_batches, RoutedExperts, "routes", kind=MicroBatchError)
    MicroBatchError.unless(
        len(recorded) == len(made),
        "another number of layouts than micro-batches were recorded",
        expected=f"{len(recorded)}, one TokenLayout a micro-batch",
        got=len(made),
        cause="forwards that belong to no micro-batch inside the record block",
    )
    blocks: Blocks = []
    for number, (block_routes, layout) in enumerate(zip(recorded, made, strict=True)):
        _check_layout(number, block_routes, layout)
        if not block_routes.layers:
            blocks.append(None)
            continue
        row_of = layout.row_of(block_routes, micro_batch(number))
        filled = row_of >= 0
        blocks.append(Block(filled, block_routes.take(row_of[filled])))
    return made, blocks


def _check_layout(number: int, routes: RoutedExperts, layout: TokenLayout) -> None:
    """Refuse a layout whose rows or tokens aren't those of the recorded call, as far as both are known."""
    called = routes.placement.inputs
    shape = None if called is None else called.shape
    if (other := find_other_order(routes.placement.row_order, layout.order, layout.fed, shape)) is not None:
        raise other.error(MicroBatchError, micro_batch(number))
    if called is None or called.tokens is None or layout.inputs is None:
        return
    differ = "tokens" in (layout.inputs.differing(Called(called.tokens, {})) or ())
    if differ:
        raise MicroBatchError(
            "the layout has other tokens than those that the model was called with in the record",
            where=micro_batch(number),
            expected="the fingerprints of the recorded tokens, in their places",
            got="others",
            cause="layouts in another order than the micro-batches, or padding on another side than the "
            "batch's",
        )


def _exchanged(
    peers: RankGroup, outcome: Outcome, blocks: Blocks, layouts: Sequence[TokenLayout], everywhere: bool
) -> Blocks:
    """Return what all ranks of the group have of each micro-batch; None on a rank that gets no result."""
    batches: list[object] = [(layout.lengths, layout.fingerprints) for layout in layouts]
    parts = outcome.attempt(lambda: [None if block is None else block.part() for block in blocks]) or []
    offers = outcome.agree(peers, _Offer(everywhere, batches, parts))
    if outcome.error is not None:
        return []
    plan = outcome.attempt(_Plan, peers, blocks, offers)
    outcome.agree(peers)  # no rank sends before all have allocated
    return [] if plan is None else outcome.attempt(plan.carried_out) or []


class _Plan:
    """Plans who sends what in one group, with the memory for it; refuses parts that don't fit."""

    def __init__(self, peers: RankGroup, blocks: Blocks, offers: list[_Offer]) -> None:
        first = offers[0]
        for rank, offer in enumerate(offers):
            if offer.batches != first.batches:
                raise MicroBatchError(
                    "the ranks have layouts of other sequences",
                    where=f"rank {rank} of the group",
                    expected=f"the lengths and fingerprints of rank 0, {len(first.batches)} micro-batches",
                    got=f"others, {len(offer.batches)} micro-batches",
                    cause="ranks of different data-parallel replicas in one group, or batches cut "
                    "differently",
                )
        self._peers = peers
        self._blocks = blocks
        receives = first.everywhere or peers.me == 0
        self._unions: list[Union | None] = []
        self._pieces: list[tuple[int, int, Part, int, int]] = []  # micro-batch, rank, part, first row, end
        most = 0
        for number in range(len(blocks)):
            senders = _senders(number, [offer.parts[number] for offer in offers])
            self._unions.append(Union(number, [*senders.values()]) if senders and receives else None)
            for rank, part in senders.items():
                step = max(1, PIECE // part.row_bytes)
                spans = [(first, min(first + step, part.rows)) for first in range(0, part.rows, step)]
                self._pieces += [(number, rank, part, *span) for span in spans]
                most = max(most, min(step, part.rows) * part.row_bytes)
        self._room = torch.empty(most, dtype=torch.uint8, device=peers.device)  # for the largest piece

    def carried_out(self) -> Blocks:
        """Send each piece to all ranks; return what this rank then has, if it gets the result."""
        outcome = Outcome()  # an error is reported afterwards, since the other ranks go on sending
        peers = self._peers
        for number, rank, part, first, end in self._pieces:
            block = self._blocks[number]
            union = self._unions[number]
            sent = self._room[: (end - first) * part.row_bytes]
            if rank == peers.me and block is not None:
                sent.copy_(block.rows(first, end))
            peers.run(partial(dist.broadcast, sent, peers.ranks[rank], peers.group, async_op=True))
            if union is not None:  # this rank gets the result
                outcome.attempt(union.put, part, first, sent)
        if outcome.error is not None:
            raise outcome.error
        return [None if union is None else union.block() for union in self._unions]


def _senders(number: int, parts: list[Part | None]) -> dict[int, Part]:
    """Return one sender for each place, as tensor-parallel ranks may have the same rows."""
    first: dict[object, tuple[int, Part]] = {}
    for rank, part in enumerate(parts):
        if part is None:
            continue
        twin, theirs = first.setdefault((part.tokens, part.like.layers), (rank, part))
        if theirs != part:
            raise MicroBatchError(
                "two ranks recorded the same tokens and layers differently",
                where=micro_batch(number),
                expected="the same routes on ranks with the same rows",
                got=f"others on rank {rank} than on rank {twin} of the group",
                cause="sequence parallelism that the layouts don't know of, or ranks whose weights or "
                "inputs have drifted apart",
            )
    return dict(first.values())


def _sequences(blocks: Blocks, layouts: Sequence[TokenLayout], groups: Groups) -> list[RoutedExperts]:
    decoder = groups.decoder if isinstance(groups, ParallelLayout) else None
    sequences = []
    for number, (block, layout) in enumerate(zip(blocks, layouts, strict=True)):
        where = micro_batch(number)
        if block is None:
            raise MicroBatchError(
                "no rank recorded any layer",
                where=where,
                expected="routes of at least one MoE layer on some rank of the groups",
                got="none",
                cause="a dense model, groups that don't reach the stages with MoE layers, or everywhere= "
                "that is False on the first rank alone",
            )
        if len(lacking := (~block.present).nonzero()):
            count = len(block.present)
            raise MicroBatchError(
                f"{len(lacking)} tokens were recorded by no rank",
                where=f"{where}, token {int(lacking[0])}",
                expected=f"all {count} tokens on some rank of the groups",
                got=count - len(lacking),
                cause="layouts that don't cover the batch, or groups without some cp or sp ranks",
            )
        layers = block.routes.layers
        wanted = layers if decoder is None else decoder.moe
        if layers != wanted:
            raise MicroBatchError(
                "some MoE layers of the model were recorded by no rank",
                where=where,
                expected=list(wanted),
                got=list(layers),
                cause="groups that leave out pipeline stages, or routers that were not in the record block",
            )
        sequences += layout.sequences(block.routes)
    return sequences


def exchange(
    stored: Mapping[int, RoutedExperts], lacking: Sequence[int], group: Any, *, patience: float = PATIENCE
) -> dict[int, RoutedExperts]:
    """Return the routes that this rank lacks and another one holds, by key; every rank must call it.

    Keys that no rank holds are left out. Raises ReplayError on all ranks if one fails, or doesn't come within
    `patience` seconds.
    """
    cause = "a rank that failed before, or another number of updates on it"
    peers = RankGroup(group, patience, "not all ranks came to exchange routes", cause)
    outcome = Outcome()
    asked = outcome.agree(peers, sorted(set(lacking)))
    offered = outcome.agree(peers, stored.keys() & {key for keys in asked for key in keys})
    holder = {key: rank for rank in reversed(range(len(offered))) for key in offered[rank]}  # the first
    wanted = [(key, holder[key], to) for to, keys in enumerate(asked) for key in keys if key in holder]
    moves = [(key, source, to) for key, source, to in wanted if peers.me in (source, to)]
    sent = {key for key, source, _ in moves if source == peers.me}
    data = outcome.attempt(lambda: {key: bytearray(pickle.dumps(stored[key])) for key in sent}) or {}
    sizes = ChainMap(*outcome.agree(peers, {key: len(routes) for key, routes in data.items()}))
    # All memory is allocated before the first message: a rank that failed between two would hang the others.
    room = outcome.attempt(lambda: _room({key: sizes[key] for key, _, _ in moves}, peers.device))
    outcome.agree(peers)
    if outcome.error is not None:
        raise outcome.error
    rows, scratch = room or ({}, torch.empty(0, device="cpu"))
    for key, source, to in moves:  # in the same order on all ranks, so each finds its partner
        here = scratch[: sizes[key]]
        sends = source == peers.me
        if sends:
            here.copy_(torch.frombuffer(data[key], dtype=torch.uint8))
        peer = peers.ranks[to if sends else source]
        message = dist.P2POp(dist.isend if sends else dist.irecv, here, peer, peers.group)
        peers.run(partial(_begin, message))
        if not sends:
            rows[key].copy_(here)
    return {key: pickle.loads(rows[key].numpy().data) for key, _, to in moves if to == peers.me}


def _room(sizes: Mapping[int, int], device: torch.device) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Return host memory for each, and one buffer for the largest where the back end wants it."""
    rows = {key: torch.empty(size, dtype=torch.uint8, device="cpu") for key, size in sizes.items()}
    return rows, torch.empty(max(sizes.values(), default=0), dtype=torch.uint8, device=device)


def _begin(message: Any) -> Any:
    # A batch of one: for single messages NCCL would make a communicator for each pair of ranks.
    return dist.batch_isend_irecv([message])[0]
