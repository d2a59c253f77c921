"""collect: routes recorded on all ranks, back to one RoutedExperts a sequence.

Every rank has what its routers saw: some rows (sequence and context parallelism) of some layers (pipeline
stages). A status goes round before anything is sent, and whoever finds an error carries it through every
group, so that all ranks leave together. Then each block of rows and layers crosses the network once, as
bytes, since back ends lack narrow integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from npu_replay.attendance import missing
from npu_replay.errors import MicroBatchError, ReplayError, micro_batch
from npu_replay.layout import TokenLayout
from npu_replay.merging import Block, digest, union
from npu_replay.parallel_layout import ParallelLayout
from npu_replay.recording import Recording
from npu_replay.routed_experts import RoutedExperts

Groups: TypeAlias = "ParallelLayout | dist.ProcessGroup | Sequence[dist.ProcessGroup]"


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
        patience: seconds to wait for a rank that doesn't come, where the back end is gloo; others have the
            timeout of their group. Give more where ranks may be further apart (one writes a checkpoint): a
            group in which one was waited for in vain is of no more use.

    Returns:
        The sequences of all micro-batches in order, with all rows and layers that the ranks have, and the
        layouts' fingerprints.

    Raises:
        ReplayError: on every rank, if any rank's arguments don't fit, a token was recorded by no rank, or
            by two in different ways; or if a rank didn't come.
    """
    over = _listed(groups)
    error: Exception | None = None
    blocks: list[Block | None] = []
    offers: list[_Offer] = []
    merged: list[RoutedExperts] = []
    try:
        layouts = _checked_layouts(layouts, groups)
        blocks = [_block(*one) for one in _numbered(routes, layouts)]
        offers = _offers(blocks, layouts)
    except Exception as problem:  # noqa: BLE001  whatever it is, the other ranks wait for us
        error = problem
    for group in over:
        error, told = _agreed(group, error, (everywhere, offers), patience)
        if error is None:
            blocks, offers, error = _exchanged(group, blocks, told, layouts, everywhere=everywhere)
    first = all(dist.get_rank(group) == 0 for group in over)
    if error is None and (everywhere or first):
        merged, error = _sequences(blocks, layouts, groups)
    for group in over:
        error, _ = _agreed(group, error, (everywhere, []), patience)
    if error is not None:
        raise error
    return merged if everywhere or first else None


@dataclass(frozen=True)
class _Offer:
    """What a rank says of one micro-batch before it sends anything.

    Attributes:
        batch: a digest of the lengths and fingerprints, the same on every rank.
        place: a digest of the tokens and layers that it has; None without any.
        content: a digest of the routes.
        size: bytes to send.
    """

    batch: str
    place: str | None = None
    content: str = ""
    size: int = 0


_Told: TypeAlias = "tuple[bool, list[_Offer]]"
"""What a rank says before anything is sent: `everywhere`, and an offer for each micro-batch."""


class _Elsewhere(ReplayError):
    """Another rank's error, as it is told here."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank} stopped, and so does this one: {text.removeprefix('[npu_replay] ')}")
        self.rank, self.text = rank, text


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
    held = torch.zeros(sum(layout.lengths), dtype=torch.bool)
    held[layout.rows[layout.rows >= 0]] = True
    return Block(held, layout.packed_rows(routes).take(held))


def _offers(blocks: Sequence[Block | None], layouts: Sequence[TokenLayout]) -> list[_Offer]:
    offers = []
    for block, layout in zip(blocks, layouts, strict=True):
        batch = digest(repr((layout.lengths, layout.fingerprints)).encode())
        if block is None:
            offers.append(_Offer(batch))
        else:
            offers.append(_Offer(batch, block.place, digest(block.data), len(block.data)))
    return offers


def _agreed(
    group: Any, error: Exception | None, say: _Told, patience: float
) -> tuple[Exception | None, list[_Told]]:
    """Exchange errors and offers; the error is the own one, or says which rank has one."""
    size = dist.get_world_size(group)
    told: list[Any] = [None] * size
    origin = (error.rank, error.text) if isinstance(error, _Elsewhere) else (dist.get_rank(), str(error))
    try:
        absent = missing(group, patience) if dist.get_backend(group) == "gloo" else []
        if absent:
            raise _lost(f"ranks {absent} within {patience:g} s", "nothing from them") from error
        dist.all_gather_object(told, (None if error is None else origin, say), group)
    except RuntimeError as gone:
        if isinstance(gone, ReplayError):
            raise
        raise _lost(f"all {size} ranks of the group", str(gone).splitlines()[0]) from gone
    problems = [problem for problem, _ in told if problem is not None]
    if error is None and problems:
        error = _Elsewhere(*problems[0])
    return error, [said for _, said in told]


def _lost(expected: str, got: str) -> ReplayError:
    return ReplayError(
        "a rank of the group didn't come to collect(), or is gone",
        where=f"rank {dist.get_rank()}",
        expected=expected,
        got=got,
        cause="an exception before collect() on that rank or on one that it waits for in turn (see its log), "
        "or ranks that are further apart in time than `patience`",
    )


def _exchanged(
    group: Any,
    blocks: list[Block | None],
    told: list[_Told],
    layouts: Sequence[TokenLayout],
    *,
    everywhere: bool,
) -> tuple[list[Block | None], list[_Offer], Exception | None]:
    """Each micro-batch with what all ranks of the group have of it; None on a rank that isn't to get it."""
    try:
        _check_alike_asked([asked for asked, _ in told])
        offers = [offers for _, offers in told]
        senders = [_senders(number, [one[number] for one in offers]) for number in _same_batches(offers)]
    except ReplayError as error:
        return blocks, [], error
    sent = _sent(group, blocks, offers, senders, everywhere=everywhere)
    try:
        parts: list[list[Block]] = [[] for _ in layouts]
        for number, data in sent:
            parts[number].append(Block.from_data(data, sum(layouts[number].lengths)))
        united = [union(number, some) for number, some in enumerate(parts)]
        return united, _offers(united, layouts), None
    except Exception as error:  # noqa: BLE001  the other ranks have to hear of it
        return blocks, [], error


def _check_alike_asked(asked: list[bool]) -> None:
    if len(set(asked)) > 1:
        raise ReplayError(
            "the ranks disagree about who gets the result",
            expected="the same `everywhere` on all ranks",
            got=asked,
            cause="everywhere=rank == 0: the first rank of the groups gets it anyway",
        )


def _same_batches(offers: list[list[_Offer]]) -> range:
    """The micro-batches, if all ranks speak of the same."""
    for rank, theirs in enumerate(offers):
        if [one.batch for one in theirs] != [one.batch for one in offers[0]]:
            raise MicroBatchError(
                "the ranks have layouts of other sequences",
                where=f"rank {rank} of the group",
                expected=f"the lengths and fingerprints of rank 0, {len(offers[0])} micro-batches",
                got=f"others, {len(theirs)} micro-batches",
                cause="ranks of different data-parallel replicas in one group, or batches cut differently",
            )
    return range(len(offers[0]))


def _senders(number: int, offers: list[_Offer]) -> list[int]:
    """The ranks that send: one for each place, though tensor-parallel ranks may have the same rows."""
    first: dict[str, int] = {}
    for rank, offer in enumerate(offers):
        if offer.place is None:
            continue
        twin = first.setdefault(offer.place, rank)
        if offers[twin].content != offer.content:
            raise MicroBatchError(
                "two ranks recorded the same tokens and layers differently",
                where=micro_batch(number),
                expected="the same routes on ranks with the same rows",
                got=f"others on rank {rank} than on rank {twin} of the group",
                cause="sequence parallelism that the layouts don't know of, or ranks whose weights or inputs "
                "have drifted apart",
            )
    return sorted(first.values())


def _sent(
    group: Any,
    blocks: list[Block | None],
    offers: list[list[_Offer]],
    senders: list[list[int]],
    *,
    everywhere: bool,
) -> list[tuple[int, memoryview]]:
    """The blocks' bytes of every sender, with their micro-batch; none on a rank that isn't to get them."""
    me, device = dist.get_rank(group), _device(group)
    found: list[tuple[int, memoryview]] = []
    for rank in range(len(offers)):
        theirs = [number for number, ranks in enumerate(senders) if rank in ranks]
        if not theirs:
            continue
        data = torch.empty(sum(offers[rank][number].size for number in theirs), dtype=torch.uint8)
        if rank == me:
            joined = b"".join(block.data for number in theirs if (block := blocks[number]) is not None)
            data = torch.frombuffer(bytearray(joined), dtype=torch.uint8)
        try:
            data = _moved(data.to(device), group, rank, me, everywhere=everywhere).cpu()
        except RuntimeError as gone:
            raise _lost("the routes of all ranks", str(gone).splitlines()[0]) from gone
        view = memoryview(data.numpy())  # type: ignore[arg-type]  # a buffer, though its stub doesn't say so
        for number in theirs if everywhere or me == 0 else ():
            end = offers[rank][number].size
            found.append((number, view[:end]))
            view = view[end:]
    return found


def _moved(data: torch.Tensor, group: Any, source: int, me: int, *, everywhere: bool) -> torch.Tensor:
    """Bring `data` from the group's rank `source` to all of its ranks, or to its first."""
    if everywhere:
        dist.broadcast(data, _global(group, source), group)
    elif source != 0 and me == source:
        dist.send(data, _global(group, 0), group)
    elif source != 0 and me == 0:
        dist.recv(data, _global(group, source), group)
    return data


def _global(group: Any, rank: int) -> int:
    return dist.get_global_rank(group, rank)


def _device(group: Any) -> torch.device:
    """Where the group's back end wants tensors: the CPU if it can."""
    kinds = [pair.partition(":")[0] for pair in dist.get_backend_config(group).split(",")]
    return torch.device("cpu" if "cpu" in kinds else kinds[0])


def _sequences(
    blocks: list[Block | None], layouts: Sequence[TokenLayout], groups: Groups
) -> tuple[list[RoutedExperts], Exception | None]:
    found: list[RoutedExperts] = []
    decoder = groups.decoder if isinstance(groups, ParallelLayout) else None
    for number, (block, layout) in enumerate(zip(blocks, layouts, strict=True)):
        if block is None:
            return [], MicroBatchError(
                "no rank recorded any layer",
                where=micro_batch(number),
                expected="routes of at least one MoE layer on some rank of the groups",
                got="none",
                cause="a dense model, or groups that don't reach the stages with MoE layers",
            )
        if not bool(block.held.all()):
            return [], MicroBatchError(
                f"{int((~block.held).sum())} tokens were recorded by no rank",
                where=f"{micro_batch(number)}, token {int((~block.held).nonzero()[0])}",
                expected=f"all {len(block.held)} tokens on some rank of the groups",
                got=int(block.held.sum()),
                cause="layouts that don't cover the batch, or groups that leave out context or sequence "
                "parallel ranks",
            )
        if decoder is not None and block.routes.layers != decoder.moe:
            return [], MicroBatchError(
                "some MoE layers of the model were recorded by no rank",
                where=micro_batch(number),
                expected=list(decoder.moe),
                got=list(block.routes.layers),
                cause="groups that leave out pipeline stages, or routers that were not in the record block",
            )
        found += layout.sequences(block.routes)
    return found, None
