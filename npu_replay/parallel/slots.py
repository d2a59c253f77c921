"""Put the tokens of sequences into padded places, and cut these over ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from npu_replay.errors import MicroBatchError, whole_number
from npu_replay.parallel.parallel_layout import Context, ParallelLayout
from npu_replay.routes.checks import MAX_TOKENS


def number_of_tokens(value: object, what: str, *, least: int = 1) -> int:
    return whole_number(value, what, least=least, most=MAX_TOKENS, kind=MicroBatchError)


def alignment(align: int | None, parallel: ParallelLayout, context: Context) -> int:
    return parallel.alignment(context) if align is None else number_of_tokens(align, "align")


def rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def padded_slots(sizes: Sequence[int], rooms: Sequence[int], left: bool = False) -> list[torch.Tensor]:
    """Return the packed tokens of each sequence in its room of places, padded with -1 at one end."""
    slots = []
    for tokens, room in zip(
        torch.split(torch.arange(sum(sizes), device="cpu"), list(sizes)), rooms, strict=True
    ):
        lacking = room - len(tokens)
        slots.append(pad(tokens, (lacking, 0) if left else (0, lacking), value=-1))
    return slots


def joined(pieces: list[torch.Tensor], multiple: int = 1) -> torch.Tensor:
    """Concatenate pieces, and pad the end with -1 to a multiple."""
    stream = torch.cat([torch.arange(0, device="cpu"), *pieces])
    return pad(stream, (0, -len(stream) % multiple), value=-1)


def context_cut(slots: torch.Tensor, parallel: ParallelLayout, context: Context, what: str) -> torch.Tensor:
    """Take this rank's part of the last dimension."""
    pieces = parallel.context_pieces(context)
    first = parallel.cp_rank
    # Zigzag gives rank r the pieces r and 2 * cp - 1 - r, so that causal attention costs each rank the same.
    mine = [first] if context == "contiguous" else [first, pieces - 1 - first]
    return cut(slots, pieces, mine, what, f"context parallel {parallel.cp}, {context}")


def cut(slots: torch.Tensor, pieces: int, mine: list[int], what: str, why: str) -> torch.Tensor:
    """Take the pieces `mine` of the last dimension, cut into equal pieces."""
    size = slots.shape[-1]
    if pieces == 1:
        return slots
    if size % pieces != 0:
        raise MicroBatchError(
            f"{what} can't be cut evenly ({why})",
            expected=f"a multiple of {pieces}",
            got=size,
            cause="padding to another multiple than the trainer's: align= or length= is what it pads to",
        )
    return slots.view(*slots.shape[:-1], pieces, size // pieces)[..., mine, :].flatten(-2)
