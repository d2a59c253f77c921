"""Where ids that one rank chose belong in its batch: one pure function.

vllm-ascend chooses experts after it has gathered a layer's tokens over ranks, or split or filled them up.
How, is decided by the way of communication and not by sizes, which may be equal by chance. Read in
`ops/fused_moe/prepare_finalize.py` and `ops/register_custom_ops.py` of 0.18.0 to 0.30.0rc2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from npu_replay.errors import ReplayError

Comm = Literal["none", "allgather", "mc2", "fused_mc2", "alltoall"]
"""How tokens come to their experts. «none»: experts are chosen from the rows as they come in."""


class Place(NamedTuple):
    """Ids `first` to `first + tokens` are those of the batch's rows from `row` on."""

    first: int
    tokens: int
    row: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What a forward knows when a layer chooses its experts.

    Attributes:
        comm: the way of communication.
        tokens: of this data-parallel rank in this step, with those that fill up a graph.
        entered: the rows that came into the layer: `tokens`, or this rank's part of them.
        sharded: are they a part, one of each tensor-parallel rank (sequence parallelism)?
        keeps_all: do all tensor-parallel ranks go on with all of them (`enable_shared_expert_dp`)?
        tp_rank, tp_size: of the tensor-parallel group.
        dp_rank: of the data-parallel group.
        across_dp: `tokens` of each data-parallel rank; empty where there is one.
    """

    comm: Comm
    tokens: int
    entered: int
    sharded: bool = False
    keeps_all: bool = False
    tp_rank: int = 0
    tp_size: int = 1
    dp_rank: int = 0
    across_dp: tuple[int, ...] = ()

    @property
    def begin(self) -> int:
        """The batch's row of the first that came in."""
        return self.tp_rank * self.entered if self.sharded else 0


def place(layout: Layout, chosen: int) -> Place:
    """Where the ids of `chosen` rows belong: none of another rank's rows, and none that only fill up.

        >>> from npu_replay.compat.vllm_ascend.placing import Layout, place
        >>> place(Layout(comm="mc2", tokens=13, entered=13, tp_rank=1, tp_size=2), 7)  # filled up to 14
        Place(first=0, tokens=6, row=7)

    Raises:
        ReplayError: so many rows don't come about in this way of communication.
    """
    if layout.comm == "allgather":
        found = _gathered(layout, chosen)
    elif layout.comm == "none" or layout.sharded or layout.keeps_all:
        fits = chosen == layout.entered or ("mc2" in layout.comm and chosen == _part_of_longest(layout))
        found = Place(0, layout.entered, layout.begin) if fits else None
    else:
        found = _split(layout, chosen)
    if found is None:
        raise ReplayError(
            f"a layer chose experts of {chosen} rows, and their place in the batch isn't known",
            expected=f"rows that come about in {layout}",
            got=f"{chosen} rows",
            cause="a way to gather or split tokens that this npu_replay doesn't know",
        )
    return found._replace(tokens=max(0, min(found.tokens, layout.tokens - found.row)))


def _gathered(layout: Layout, chosen: int) -> Place | None:
    """The tokens of all data-parallel ranks, one behind the other: filled up to the longest; or, gathered
    from parts, as they are (to 0.26) or each filled up to equal parts (from 0.27 on)."""
    own = layout.across_dp or (layout.tokens,)
    rank = layout.dp_rank if layout.across_dp else 0
    in_parts = [_filled(tokens, layout.tp_size) for tokens in own]
    for lengths in [own, in_parts] if layout.sharded else [[max(own)] * len(own)]:
        if chosen == sum(lengths):  # where both hold, they are the same
            return Place(sum(lengths[:rank]), layout.tokens, 0)
    return None


def _split(layout: Layout, chosen: int) -> Place | None:
    """All tokens came in, and each tensor-parallel rank takes a part, as `torch.tensor_split` cuts them."""
    if layout.comm == "alltoall":
        total = max(layout.tokens, layout.tp_size)
    else:
        total = _part_of_longest(layout) * layout.tp_size
    each, more = divmod(total, layout.tp_size)
    rank = layout.tp_rank
    fits = chosen == each + (rank < more)
    return Place(0, chosen, rank * each + min(rank, more)) if fits else None


def _part_of_longest(layout: Layout) -> int:
    """What MC2 fills up to: an equal part of the tokens of the data-parallel rank that has most."""
    return _filled(max(layout.across_dp, default=layout.tokens), layout.tp_size) // layout.tp_size


def _filled(tokens: int, parts: int) -> int:
    return -(-tokens // parts) * parts
