"""collect: routes recorded on all ranks, back to one RoutedExperts a sequence.

Every rank has what its routers saw: some rows (sequence and context parallelism) of some layers (pipeline
stages). What each has goes round before anything is sent, and whoever finds an error carries it through every
group, so that all ranks leave together. Then each block of rows and layers crosses the network once, as
bytes, since back ends lack narrow integers, in pieces that go straight into the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from npu_replay.errors import MicroBatchError, ReplayError, micro_batch
from npu_replay.parallel.merge import Block, Part, Union
from npu_replay.parallel.parallel_layout import ParallelLayout
from npu_replay.parallel.ranks import Circle, StoppedByRank
from npu_replay.parallel.token_layout import TokenLayout
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.sessions.record import Recording

PIECE = 1 << 24
"""Bytes that are sent at once: beside the result a rank needs no more than this."""

Groups: TypeAlias = "ParallelLayout | dist.ProcessGroup | Sequence[dist.ProcessGroup]"


_PURPOSE = "a rank of the group didn't come to collect(), or is gone"
_CAUSE = (
    "an exception before collect() on that rank or on one that it waits for in turn (see its log), or ranks "
    "that are further apart in time than `patience`"
)


def collect(
    routes: Recording | Sequence[RoutedExperts],
    layouts: Sequence[TokenLayout],
    groups: Groups,
    *,
    everywhere: bool = True,
    patience: float = 20.0,
) -> list[RoutedExperts] | None:
    """Merge what the ranks of `groups` recorded into one RoutedExperts a sequence.

        with npu_replay.record(chunks) as recording:
            forward_backward_func(..., forward_only=True)
        sequences = npu_replay.collect(recording, layouts, ParallelLayout.from_megatron(chunks))

    Every rank of the groups has to call it, one without any MoE layer too.

    Args:
        routes: this rank's recording, or its `routes`: one RoutedExperts a micro-batch.
        layouts: this rank's TokenLayout of each micro-batch.
        groups: a ParallelLayout that was read from a running framework; or process groups, which are merged
            over one after the other: first the ranks that share a pipeline stage, then the stages.
        everywhere: every rank gets the result; else only the first rank of the groups, and the others None.
        patience: seconds to wait for a rank that doesn't come; twice that in a second group, whose ranks may
            wait in a first one. Give more where ranks may be further apart (one writes a checkpoint): a group
            in which one was waited for in vain is of no more use.

    Returns:
        The sequences of all micro-batches in order, with all rows and layers that the ranks have, and the
        layouts' fingerprints.

    Raises:
        ReplayError: on every rank, if any rank's arguments don't fit, a token was recorded by no rank, or
            by two in different ways; or if a rank didn't come.
    """
    listed = _listed(groups)
    # One who has waited in vain in a group comes late to the next, where it says so: the others give it time.
    over = [Circle(group, patience * (number + 1), _PURPOSE, _CAUSE) for number, group in enumerate(listed)]
    error: Exception | None = None
    blocks: list[Block | None] = []
    merged: list[RoutedExperts] = []
    try:
        layouts = _checked_layouts(layouts, groups)
        blocks = [_block(*one) for one in _numbered(routes, layouts)]
    except Exception as problem:  # noqa: BLE001  whatever it is, the other ranks wait for us
        error = problem
    for circle in over:
        blocks, error = _exchanged(circle, blocks, error, layouts, everywhere=everywhere)
    first = all(circle.me == 0 for circle in over)
    if error is None and (everywhere or first):
        try:
            merged = list(_sequences(blocks, layouts, groups))
        except Exception as problem:  # noqa: BLE001  as above
            error = problem
    for circle in over:
        circle.patience += patience * len(over)
        error, _ = _agreed(circle, error)
    if error is not None:
        raise error
    return merged if everywhere or first else None


@dataclass(frozen=True)
class _Offer:
    """What a rank says before it sends anything.

    Attributes:
        everywhere: as it was asked.
        batches: the lengths and fingerprints of each micro-batch.
        parts: what it has of each; None without MoE layers.
    """

    everywhere: bool
    batches: list[object]
    parts: list[Part | None]


def _listed(groups: Groups) -> list[Any]:
    """The process groups that this rank isn't alone in."""
    if isinstance(groups, ParallelLayout):
        if not groups.groups and groups.tp * groups.cp * groups.pp > 1:
            raise ReplayError(
                "this ParallelLayout has no process groups to collect over",
                expected="ParallelLayout.from_megatron(model), or groups=(...) beside the numbers",
                got=f"tp={groups.tp}, cp={groups.cp}, pp={groups.pp} given by hand",
            )
        groups = groups.groups
    listed: list[Any] = list(groups) if isinstance(groups, Iterable) else [groups]
    for group in listed:
        if not isinstance(group, dist.ProcessGroup):
            raise ReplayError("this isn't a process group", expected="torch's ProcessGroup", got=type(group))
        if dist.get_rank(group) < 0:
            raise ReplayError("this rank isn't in the group", expected="a group of this rank", got=group)
    return [group for group in listed if dist.get_world_size(group) > 1]


def _checked_layouts(layouts: Any, groups: Groups) -> list[TokenLayout]:
    """The layouts, if they were made for this rank."""
    if isinstance(layouts, TokenLayout):
        raise MicroBatchError(
            "layouts are given as a list",
            expected="one TokenLayout a micro-batch",
            got="a single TokenLayout",
        )
    listed = list(layouts)
    for number, layout in enumerate(listed):
        made_for = layout.parallel if isinstance(layout, TokenLayout) else None
        if isinstance(groups, ParallelLayout) and made_for is not None and made_for.cut != groups.cut:
            raise MicroBatchError(
                "the layout was made for another rank",
                where=micro_batch(number),
                expected=f"cp {groups.cp}, rank {groups.cp_rank}; rows in {groups.slices_rows} slices, "
                f"tp rank {groups.tp_rank}",
                got=f"cp {made_for.cp}, rank {made_for.cp_rank}; rows in {made_for.slices_rows} slices, "
                f"tp rank {made_for.tp_rank}",
                cause="the layouts of another rank, or a ParallelLayout that was changed in between",
            )
    return listed


def _numbered(routes: Any, layouts: Sequence[TokenLayout]) -> list[tuple[int, RoutedExperts, TokenLayout]]:
    if isinstance(routes, RoutedExperts):
        raise MicroBatchError(
            "routes are given as a list",
            expected="one RoutedExperts a micro-batch",
            got="a single one",
        )
    listed = list(routes.routes if isinstance(routes, Recording) else routes)
    if len(listed) != len(layouts):
        raise MicroBatchError(
            "another number of layouts than micro-batches were recorded",
            expected=f"{len(listed)}, one TokenLayout a micro-batch",
            got=len(layouts),
            cause="forwards that belong to no micro-batch inside the record block",
        )
    return [(number, one, layout) for number, (one, layout) in enumerate(zip(listed, layouts, strict=True))]


def _block(number: int, routes: object, layout: object) -> Block | None:
    """What this rank recorded of a micro-batch, without its padding; None without MoE layers."""
    if not isinstance(routes, RoutedExperts) or not isinstance(layout, TokenLayout):
        raise MicroBatchError(
            "collect takes one RoutedExperts and one TokenLayout a micro-batch",
            where=micro_batch(number),
            expected="RoutedExperts and TokenLayout",
            got=f"{type(routes).__name__} and {type(layout).__name__}",
        )
    if not routes.layers:
        return None
    if len(routes) != len(layout.rows):
        raise MicroBatchError(
            "the recorded routes have another number of rows than the layout",
            where=micro_batch(number),
            expected=f"{len(layout.rows)} rows",
            got=len(routes),
            cause="a layout made for other lengths, another padding, or another rank",
        )
    filled = (layout.rows >= 0).nonzero()[:, 0]
    tokens, order = layout.rows[filled].sort()
    held = torch.zeros(sum(layout.lengths), dtype=torch.bool)
    held[tokens] = True
    return Block(held, routes.take(filled[order]))


def _agreed(
    circle: Circle, error: Exception | None, say: object = None
) -> tuple[Exception | None, list[Any]]:
    """What the ranks of the group say; the error is the own one, or says which rank has one."""
    try:
        told = circle.tell(error, say)
    except Exception as lost:  # noqa: BLE001  it goes on to the other groups
        return error or lost, []
    problems = [problem for problem, _ in told if problem is not None]
    if error is None and problems:
        error = StoppedByRank(*problems[0])
    return error, [said for _, said in told]


def _exchanged(
    circle: Circle,
    blocks: list[Block | None],
    error: Exception | None,
    layouts: Sequence[TokenLayout],
    *,
    everywhere: bool,
) -> tuple[list[Block | None], Exception | None]:
    """Each micro-batch with what all ranks of the group have of it; None on a rank that isn't to get it."""
    offer = plan = None
    try:
        if error is None:
            offer = _Offer(
                everywhere,
                [(layout.lengths, layout.fingerprints) for layout in layouts],
                [None if block is None else block.part() for block in blocks],
            )
    except Exception as problem:  # noqa: BLE001  the other ranks wait for us
        error = problem
    error, offers = _agreed(circle, error, offer)
    if error is not None:
        return blocks, error
    try:
        plan = _Plan(circle, blocks, offers, layouts)
    except Exception as problem:  # noqa: BLE001  as above
        error = problem
    error, _ = _agreed(circle, error)  # nobody sends before all have the memory for it
    if error is not None or plan is None:
        return blocks, error
    try:
        return plan.carried_out(), None
    except Exception as problem:  # noqa: BLE001  the other ranks have to hear of it
        return blocks, problem


@dataclass(frozen=True)
class _Piece:
    """Some rows of what one rank of the group sends of one micro-batch."""

    number: int
    rank: int
    part: Part
    first: int
    end: int

    @property
    def bytes(self) -> int:
        return (self.end - self.first) * self.part.row_bytes


class _Plan:
    """Who sends what in one group, with the memory that this rank needs for it.

    Raises:
        ReplayError: what the ranks have doesn't go together.
    """

    def __init__(
        self,
        circle: Circle,
        blocks: list[Block | None],
        offers: list[_Offer],
        layouts: Sequence[TokenLayout],
    ) -> None:
        _check_alike_asked([offer.everywhere for offer in offers])
        _check_same_batches([offer.batches for offer in offers])
        self._circle, self._blocks = circle, blocks
        self._everywhere = offers[0].everywhere
        self._tokens = [sum(layout.lengths) for layout in layouts]
        self._senders = [
            _senders(number, [offer.parts[number] for offer in offers]) for number in range(len(layouts))
        ]
        self._unions = [self._union(number) for number in range(len(layouts))]
        self._buffer = torch.empty(
            max((piece.bytes for piece in self._pieces()), default=0), dtype=torch.uint8
        )
        self._there = self._buffer.to(circle.device)

    def carried_out(self) -> list[Block | None]:
        """What this rank has of each micro-batch when all have sent.

        Raises:
            ReplayError: two ranks' routes don't go together, or ranks are gone.
        """
        problem: Exception | None = None
        for piece in self._pieces():
            data, union = self._moved(piece), self._unions[piece.number]
            if union is not None and problem is None:
                try:
                    union.put(piece.part, piece.first, data)
                except Exception as wrong:  # noqa: BLE001  the others go on sending, and hear of it afterwards
                    problem = wrong
        if problem is not None:
            raise problem
        return [
            (self._blocks[number] if self._alone(number) else None) if union is None else union.block()
            for number, union in enumerate(self._unions)
        ]

    def _receives(self) -> bool:
        return self._everywhere or self._circle.me == 0

    def _alone(self, number: int) -> bool:
        """Is what this rank has of the micro-batch all that there is, and to stay here?"""
        return self._receives() and [rank for rank, _ in self._senders[number]] == [self._circle.me]

    def _union(self, number: int) -> Union | None:
        parts = [part for _, part in self._senders[number]]
        if not parts or not self._receives() or self._alone(number):
            return None
        return Union(number, self._tokens[number], parts)

    def _pieces(self) -> Iterator[_Piece]:
        for number, senders in enumerate(self._senders):
            for rank, part in senders:
                step = max(1, PIECE // part.row_bytes)
                for first in range(0, part.rows, step):
                    yield _Piece(number, rank, part, first, min(first + step, part.rows))

    def _moved(self, piece: _Piece) -> torch.Tensor:
        """The piece's ids as bytes, on each rank that is to get them."""
        circle, block = self._circle, self._blocks[piece.number]
        mine, sent = self._buffer[: piece.bytes], self._there[: piece.bytes]
        if piece.rank == circle.me and block is not None:
            mine = block.rows(piece.first, piece.end)
            sent = mine if circle.device.type == "cpu" else sent.copy_(mine)
        if self._everywhere:
            source = circle.ranks[piece.rank]
            circle.run(lambda: dist.broadcast(sent, source, circle.group, async_op=True))
        elif piece.rank != 0 and circle.me == piece.rank:
            circle.run(lambda: dist.isend(sent, circle.ranks[0], circle.group))
        elif piece.rank != 0 and circle.me == 0:
            circle.run(lambda: dist.irecv(sent, circle.ranks[piece.rank], circle.group))
        if sent.device != mine.device and piece.rank != circle.me:
            mine.copy_(sent)
        return mine


def _check_alike_asked(asked: list[bool]) -> None:
    if len(set(asked)) > 1:
        raise ReplayError(
            "the ranks disagree about who gets the result",
            expected="the same `everywhere` on all ranks",
            got=asked,
            cause="everywhere=rank == 0: the first rank of the groups gets it anyway",
        )


def _check_same_batches(batches: list[list[object]]) -> None:
    for rank, theirs in enumerate(batches):
        if theirs != batches[0]:
            raise MicroBatchError(
                "the ranks have layouts of other sequences",
                where=f"rank {rank} of the group",
                expected=f"the lengths and fingerprints of rank 0, {len(batches[0])} micro-batches",
                got=f"others, {len(theirs)} micro-batches",
                cause="ranks of different data-parallel replicas in one group, or batches cut differently",
            )


def _senders(number: int, parts: list[Part | None]) -> list[tuple[int, Part]]:
    """The ranks that send: one for each place, though tensor-parallel ranks may have the same rows."""
    first: dict[object, tuple[int, Part]] = {}
    for rank, part in enumerate(parts):
        if part is None:
            continue
        twin, theirs = first.setdefault(part.place, (rank, part))
        if theirs != part:
            raise MicroBatchError(
                "two ranks recorded the same tokens and layers differently",
                where=micro_batch(number),
                expected="the same routes on ranks with the same rows",
                got=f"others on rank {rank} than on rank {twin} of the group",
                cause="sequence parallelism that the layouts don't know of, or ranks whose weights or inputs "
                "have drifted apart",
            )
    return list(first.values())


def _sequences(
    blocks: list[Block | None], layouts: Sequence[TokenLayout], groups: Groups
) -> Iterator[RoutedExperts]:
    decoder = groups.decoder if isinstance(groups, ParallelLayout) else None
    for number, (block, layout) in enumerate(zip(blocks, layouts, strict=True)):
        if block is None:
            raise MicroBatchError(
                "no rank recorded any layer",
                where=micro_batch(number),
                expected="routes of at least one MoE layer on some rank of the groups",
                got="none",
                cause="a dense model, or groups that don't reach the stages with MoE layers",
            )
        if not bool(block.held.all()):
            raise MicroBatchError(
                f"{int((~block.held).sum())} tokens were recorded by no rank",
                where=f"{micro_batch(number)}, token {int((~block.held).nonzero()[0])}",
                expected=f"all {len(block.held)} tokens on some rank of the groups",
                got=int(block.held.sum()),
                cause="layouts that don't cover the batch, or groups that leave out context or sequence "
                "parallel ranks",
            )
        if decoder is not None and block.routes.layers != decoder.moe:
            raise MicroBatchError(
                "some MoE layers of the model were recorded by no rank",
                where=micro_batch(number),
                expected=list(decoder.moe),
                got=list(block.routes.layers),
                cause="groups that leave out pipeline stages, or routers that were not in the record block",
            )
        yield from layout.sequences(block.routes)
