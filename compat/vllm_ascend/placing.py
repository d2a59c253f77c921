"""Computes the rows of the batch to which ids that one rank chose belong.

vllm-ascend chooses experts after it has gathered a layer's tokens over ranks, or split or padded them. The
way of communication decides it, not the sizes, which may be equal by chance. Read in
`ops/fused_moe/prepare_finalize.py` and `ops/register_custom_ops.py` of 0.18.0 to 0.30.0rc2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from npu_replay.errors import ReplayError

Comm = Literal["none", "allgather", "mc2", "fused_mc2", "alltoall"]
"""The way tokens are sent to their experts. «none»: experts are chosen from the rows as they come in."""


class Place(NamedTuple):
    """Says that ids `first` to `first + tokens` are those of the batch's rows from `row` on."""

    first: int
    tokens: int
    row: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Describes a forward at the moment when a layer chooses its experts.

    Attributes:
        tokens: of this data-parallel rank in this step, with those that pad a graph.
        entered: the rows that came into the layer: `tokens`, or this rank's part of them.
        sharded: they are a part, one of each tensor-parallel rank (sequence parallelism).
        keeps_all: all tensor-parallel ranks continue with all of them (`enable_shared_expert_dp`).
        across_dp: `tokens` of each data-parallel rank; empty if there is one.
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
        """Return the batch's row of the first that came in."""
        return self.tp_rank * self.entered if self.sharded else 0

    @property
    def whole(self) -> bool:
        """Return whether each tensor-parallel rank chooses for all tokens."""
        unsplit = self.comm == "none" or self.keeps_all
        return self.comm == "allgather" or (unsplit and not self.sharded)


def place(layout: Layout, chosen: int) -> Place:
    """Return where the ids of `chosen` rows belong, without other ranks' rows and padding.

    >>> from npu_replay.compat.vllm_ascend.placing import Layout, place
    >>> place(Layout(comm="mc2", tokens=13, entered=13, tp_rank=1, tp_size=2), 7)  # padded to 14
    Place(first=0, tokens=6, row=7)
    """
    own_place = None
    if layout.comm == "allgather":
        # The tokens of all data-parallel ranks, one after the other. They are padded to the longest; or,
        # gathered from parts, left as they are (to 0.26) or each padded to equal parts (from 0.27 on).
        own = layout.across_dp or (layout.tokens,)
        rank = layout.dp_rank if layout.across_dp else 0
        in_parts = [_filled(tokens, layout.tp_size) for tokens in own]
        for lengths in [own, in_parts] if layout.sharded else [[max(own)] * len(own)]:
            if chosen == sum(lengths):  # if both fit, they are the same
                own_place = Place(sum(lengths[:rank]), layout.tokens, 0)
    elif layout.comm == "none" or layout.sharded or layout.keeps_all:
        filled = layout.sharded and "mc2" in layout.comm and chosen * layout.tp_size == _longest(layout)
        if chosen == layout.entered or filled:
            own_place = Place(0, layout.entered, layout.begin)
    else:
        # Each tensor-parallel rank takes a part, as `torch.tensor_split` cuts them.
        alltoall = layout.comm == "alltoall"
        rank = layout.tp_rank
        total = max(layout.tokens, layout.tp_size) if alltoall else _longest(layout)
        each, more = divmod(total, layout.tp_size)
        if chosen == each + (rank < more):
            own_place = Place(0, chosen, rank * each + min(rank, more))
    if own_place is None:
        raise ReplayError(
            f"a layer chose experts of {chosen} rows, and their place in the batch isn't known",
            expected=f"rows that come about in {layout}",
            got=f"{chosen} rows",
            cause="an unknown way to gather or split tokens",
        )
    return own_place._replace(tokens=max(0, min(own_place.tokens, layout.tokens - own_place.row)))


def _longest(layout: Layout) -> int:
    """Return the rows that MC2 pads to: the longest data-parallel rank's tokens, in equal parts."""
    return _filled(max(layout.across_dp, default=layout.tokens), layout.tp_size)


def _filled(tokens: int, parts: int) -> int:
    return -(-tokens // parts) * parts
