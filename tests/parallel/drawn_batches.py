"""Batches of sequences and ways to cut them over ranks, drawn by chance, and where each token goes, one at a
time, with plain lists and no thought of speed. A token is its number in the batch, padding is None."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

from hypothesis import strategies as st

from npu_replay import ParallelLayout, TokenLayout

Cell = int | None


def context_owner(position: int, length: int, cp: int, context: str) -> int:
    """Which context parallel rank holds this position of `length`."""
    if cp == 1:
        return 0
    if context == "contiguous":
        return position // (length // cp)
    chunk = position // (length // (2 * cp))
    (owner,) = [rank for rank in range(cp) if chunk in (rank, 2 * cp - 1 - rank)]
    return owner


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

    def slow(self, rank: ParallelLayout) -> list[Cell]:
        """The rows of a rank's router, one token at a time."""
        columns = [*zip(*self.grid(rank.cp_rank), strict=True)]
        if rank.sequence_parallel and not rank.gathers_rows:
            size = len(columns) // rank.tp
            columns = columns[rank.tp_rank * size :][:size]
        rows = zip(*columns, strict=True) if self.about.get("order") == "batch" else columns
        return [cell for row in rows for cell in row]

    def sequences(self) -> list[list[Cell]]:
        """Each with its padding, at the right or the left."""
        numbers = count()
        padded: list[list[Cell]] = []
        for size, room in zip(self.lengths, self.rooms, strict=True):
            tokens = [next(numbers) for _ in range(size)]
            blank = [None] * (room - size)
            padded.append([*blank, *tokens] if self.about.get("side") == "left" else [*tokens, *blank])
        return padded

    def part(self, cells: Sequence[Cell], cp_rank: int) -> list[Cell]:
        """Those that a context parallel rank holds."""
        cp = self.sizes["cp"]
        owners = [context_owner(at, len(cells), cp, self.context) for at in range(len(cells))]
        return [cell for cell, owner in zip(cells, owners, strict=True) if owner == cp_rank]

    def grid(self, cp_rank: int) -> list[list[Cell]]:
        """What a context parallel rank has, [batch][sequence]; one row of packed sequences."""
        whole = self.sequences()
        if self.is_padded:
            return [self.part(cells, cp_rank) for cells in whole]
        align_end = self.about.get("align_end", 1)
        if self.context == "zigzag":  # each sequence is cut, then the rank's end is padded
            here = [cell for cells in whole for cell in self.part(cells, cp_rank)]
            return [here + [None] * (-len(here) % align_end)]
        stream = [cell for cells in whole for cell in cells]
        stream += [None] * (-len(stream) % (align_end * self.sizes["cp"]))
        return [self.part(stream, cp_rank)]


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
