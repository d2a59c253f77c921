"""Batches of sequences and ways to cut them over ranks, drawn by chance."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from hypothesis import strategies as st

from npu_replay import ParallelLayout, TokenLayout
from parallel import slow_layout


class Batch(NamedTuple):
    """Sequences, how a job cuts them, and how they are padded.

    Attributes:
        sizes: of the job's axes.
        rooms: what each sequence comes to be padded to.
        about: the arguments that say so.
        is_padded: to one length; else packed.
    """

    sizes: dict[str, Any]
    context: str
    lengths: list[int]
    rooms: list[int]
    about: dict[str, Any]
    is_padded: bool

    def ranks(self) -> Iterator[ParallelLayout]:
        for cp_rank in range(self.sizes["cp"]):
            for tp_rank in range(self.sizes["tp"]):
                yield ParallelLayout(**self.sizes, cp_rank=cp_rank, tp_rank=tp_rank)

    def layout(self, parallel: ParallelLayout, **more: Any) -> TokenLayout:
        make = TokenLayout.padded if self.is_padded else TokenLayout.packed
        return make(self.lengths, context=self.context, parallel=parallel, **self.about, **more)

    def slow(self, rank: ParallelLayout, **changes: Any) -> list[slow_layout.Cell]:
        """The same rows, one token at a time."""
        about = {name: getattr(rank, name) for name in ("tp", "tp_rank", "cp", "cp_rank")}
        about |= {"context": self.context, "slices": rank.sequence_parallel and not rank.gathers_rows}
        if self.is_padded:
            about |= {"side": self.about["side"], "order": self.about["order"]}
            return slow_layout.padded(self.lengths, self.rooms[0], **about | changes)
        end = self.about.get("align_end", 1)
        return slow_layout.packed(self.lengths, self.rooms, align_end=end, **about | changes)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    sizes: dict[str, Any] = {axis: draw(st.integers(1, 3)) for axis in ("tp", "cp")}
    sizes |= {flag: draw(st.booleans()) for flag in ("sequence_parallel", "gathers_rows")}
    context = draw(st.sampled_from(["zigzag", "contiguous"]))
    is_padded = draw(st.booleans())
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
    how = draw(st.sampled_from(["told", "align", "least"]))
    layout = ParallelLayout(**sizes)
    least = layout.alignment(context)
    align = least * (1 if how == "least" else draw(st.integers(1, 3)))
    more = draw(st.integers(0, 2)) * least if how == "told" else 0
    rooms = [
        -(-size // align) * align + more for size in ([max(lengths)] * len(lengths) if is_padded else lengths)
    ]
    about: dict[str, Any] = {"align": align} if how == "align" else {}
    if is_padded:
        orders = ["sequence"] if layout.slices_rows > 1 else ["sequence", "batch"]
        about |= {"side": draw(st.sampled_from(["right", "left"])), "order": draw(st.sampled_from(orders))}
        about |= {"length": rooms[0]} if how == "told" else {}
    elif how == "told":
        about["padded_lengths"] = rooms = [room + draw(st.integers(0, 2)) * least for room in rooms]
    if not is_padded and draw(st.booleans()):
        about["align_end"] = layout.slices_rows * draw(st.integers(1, 5))
    return Batch(sizes, context, lengths, rooms, about, is_padded)
