"""Where every token and every layer goes, one at a time: what the layouts are held against.

Plain lists, nothing of npu_replay, and no thought of speed. A token is its number in the packed batch,
padding is None.
"""

from __future__ import annotations

from collections.abc import Sequence

Cell = int | None


def grid(lengths: Sequence[int], length: int, side: str) -> list[list[Cell]]:
    """[batch][length], each sequence at the right or the left end of its row."""
    rows: list[list[Cell]] = []
    token = 0
    for size in lengths:
        tokens = [*range(token, token + size)]
        blank: list[Cell] = [None] * (length - size)
        rows.append([*tokens, *blank] if side == "right" else [*blank, *tokens])
        token += size
    return rows


def context_owner(position: int, length: int, cp: int, context: str) -> int:
    """Which context parallel rank holds this position of `length`."""
    if cp == 1:
        return 0
    if context == "contiguous":
        return position // (length // cp)
    chunk = position // (length // (2 * cp))
    owners = [rank for rank in range(cp) if chunk in (rank, 2 * cp - 1 - rank)]
    assert len(owners) == 1
    return owners[0]


def tensor_owner(position: int, length: int, tp: int) -> int:
    """Which tensor parallel rank holds this position, where sequence parallelism cuts."""
    return position // (length // tp)


def padded(
    lengths: Sequence[int],
    length: int,
    *,
    side: str = "right",
    order: str = "sequence",
    context: str = "zigzag",
    cp: int = 1,
    cp_rank: int = 0,
    tp: int = 1,
    tp_rank: int = 0,
    slices: bool = False,
) -> list[Cell]:
    """The router's rows on one rank, of a batch that is padded to `length`."""
    cells = grid(lengths, length, side)
    columns = [at for at in range(length) if context_owner(at, length, cp, context) == cp_rank]
    if slices:
        columns = [
            column
            for number, column in enumerate(columns)
            if tensor_owner(number, len(columns), tp) == tp_rank
        ]
    if order == "sequence":
        return [row[column] for column in columns for row in cells]
    return [row[column] for row in cells for column in columns]


def packed(
    lengths: Sequence[int],
    padded_lengths: Sequence[int],
    *,
    align_end: int = 1,
    context: str = "zigzag",
    cp: int = 1,
    cp_rank: int = 0,
    tp: int = 1,
    tp_rank: int = 0,
    slices: bool = False,
) -> list[Cell]:
    """The router's rows on one rank, of sequences that lie one after the other."""
    token = 0
    sequences: list[list[Cell]] = []
    for size, room in zip(lengths, padded_lengths, strict=True):
        sequences.append([*range(token, token + size), *[None] * (room - size)])
        token += size
    stream: list[Cell] = []
    if context == "zigzag":
        for cells in sequences:
            for at, cell in enumerate(cells):
                if context_owner(at, len(cells), cp, "zigzag") == cp_rank:
                    stream.append(cell)
        while len(stream) % align_end:
            stream.append(None)
    else:
        whole = [cell for cells in sequences for cell in cells]
        while len(whole) % (cp * align_end):
            whole.append(None)
        for at, cell in enumerate(whole):
            if context_owner(at, len(whole), cp, "contiguous") == cp_rank:
                stream.append(cell)
    if not slices:
        return stream
    return [cell for at, cell in enumerate(stream) if tensor_owner(at, len(stream), tp) == tp_rank]


def stages(
    count: int,
    pp: int,
    vp: int = 1,
    *,
    first: int | None = None,
    last: int | None = None,
    embedding: bool = False,
    loss: bool = False,
    table: Sequence[Sequence[int]] | None = None,
) -> dict[tuple[int, int], list[int]] | None:
    """(stage, virtual stage) -> its decoder layers, dealt out one by one; None if they don't come out even.

    The chunks of virtual stage 0 come first, on every stage, then those of virtual stage 1.
    """
    things: list[str | int] = [
        *(["embedding"] if embedding else []),
        *range(count),
        *(["loss"] if loss else []),
    ]
    room = _room(len(things), pp, vp, first, last) if table is None else table
    if room is None or sum(sum(row) for row in room) != len(things):
        return None
    dealt: dict[tuple[int, int], list[int]] = {}
    for vp_rank in range(vp):
        for pp_rank in range(pp):
            here = [things.pop(0) for _ in range(room[pp_rank][vp_rank])]
            dealt[pp_rank, vp_rank] = [thing for thing in here if isinstance(thing, int)]
    assert not things
    return dealt


def _room(things: int, pp: int, vp: int, first: int | None, last: int | None) -> list[list[int]] | None:
    """How many things each chunk takes."""
    fixed = {rank: size for rank, size in ((0, first), (pp - 1, last)) if size is not None}
    left = things - sum(fixed.values())
    others = pp - len(fixed)
    if left < 0 or (others and left % others):
        return None
    stage_room = [fixed.get(rank, left // max(others, 1)) for rank in range(pp)]
    return None if any(room % vp for room in stage_room) else [[room // vp] * vp for room in stage_room]


def has_router(layer: int, moe_layer_freq: int | Sequence[int]) -> bool:
    """An integer n: every n-th layer, from the first; a list: one entry a layer."""
    if isinstance(moe_layer_freq, int):
        return layer % moe_layer_freq == 0
    return bool(moe_layer_freq[layer])
