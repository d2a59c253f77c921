"""TokenLayout: which token sits in which row of the router.

Routes ride the same road as the tokens: one index `row -> packed token or none`, and one gather.
«Packed» is the tokens of all sequences one after the other, without padding.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias

import torch

from npu_replay.errors import MicroBatchError, ReplayError, listed, one_of, share, shown, whole_number
from npu_replay.parallel import bad_samples, probed_layout
from npu_replay.parallel.parallel_layout import Context, ParallelLayout
from npu_replay.routes.arguments import is_plain
from npu_replay.routes.inputs import LaidOut
from npu_replay.routes.routed_experts import RoutedExperts

Order: TypeAlias = Literal["sequence", "batch"]
"""How [batch, sequence] is flattened: sequence-major as Megatron's routers see it (s*b), or batch-major as
those of Hugging Face do (b*s)."""

_ALONE = ParallelLayout()
_MOST_TOKENS = 1 << 31

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, repr=False)
class TokenLayout:
    """For one rank and micro-batch: the packed token in each row of the router.

    Attributes:
        rows: int64 [rows], the packed token, or -1 for padding.
        lengths: tokens of each sequence.
        fingerprints: of each sequence's tokens, if they are to be checked; None for one that isn't.
        parallel: the rank that it was made for, if it was said; `collect` holds it against its own.
        order: how [batch, sequence] became the rows; None where there is but one way.
        fed: int64, the packed token in each place of what the model is called with, or -1 for padding; None
            where it isn't known, or a rank has only a part of each sequence.

    Raises:
        MicroBatchError: rows that are no tokens of these sequences, or hold a token twice.
    """

    rows: torch.Tensor
    lengths: tuple[int, ...]
    fingerprints: Sequence[int | None] | None = None
    parallel: ParallelLayout | None = None
    order: Order | None = None
    fed: torch.Tensor | None = None

    def __post_init__(self) -> None:
        try:
            rows = torch.as_tensor(self.rows).detach().cpu()
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise MicroBatchError(
                "the rows of a layout are whole numbers", expected="integers", got=shown(self.rows)
            ) from error
        if not is_plain(rows) or rows.is_complex():
            raise MicroBatchError(
                "the rows of a layout are a plain tensor", expected="int64", got=shown(rows)
            )
        if rows.numel() and (rows.is_floating_point() or rows.dtype == torch.bool):
            raise MicroBatchError(
                "the rows of a layout are whole numbers", expected="integers", got=rows.dtype
            )
        object.__setattr__(self, "rows", rows.to(torch.int64, copy=True))  # frozen, and checked below
        object.__setattr__(self, "lengths", _sizes(self.lengths))
        if self.fingerprints is not None:
            object.__setattr__(self, "fingerprints", _marks(self.fingerprints))
            if len(self.fingerprints) != len(self.lengths):
                raise MicroBatchError(
                    "another number of fingerprints than sequences",
                    expected=len(self.lengths),
                    got=len(self.fingerprints),
                )
        _check_rows(self.rows, sum(self.lengths))

    def __repr__(self) -> str:
        tokens = int((self.rows >= 0).sum())
        marks = ", with fingerprints" if self.fingerprints is not None else ""
        where = "" if self.parallel is None else f", {self.parallel!r}"
        return (
            f"TokenLayout({len(self.rows)} rows, {tokens} of the {sum(self.lengths)} tokens of "
            f"{len(self.lengths)} sequences{marks}{where})"
        )

    @classmethod
    def padded(
        cls,
        lengths: Sequence[int],
        length: int | None = None,
        *,
        side: Literal["right", "left"] = "right",
        order: Order = "sequence",
        align: int | None = None,
        context: Context = "zigzag",
        parallel: ParallelLayout | None = None,
        fingerprints: Sequence[int] | None = None,
    ) -> TokenLayout:
        """The layout of a padded batch [batch, length].

        Args:
            lengths: tokens of each sequence.
            length: what they are padded to, before any rank takes its part. When not given: the longest,
                rounded up to a multiple of `align`.
            side: where the padding is.
            order: "sequence" for Megatron's routers (s*b), "batch" for those of Hugging Face (b*s).
            align: see `length`; when not given, the least that `parallel` requires.
            context: how context parallelism cuts the sequence dimension.
            parallel: which rank this is of how many; when not given, the only one.
            fingerprints: one for each sequence, held against those of the routes.

        Raises:
            MicroBatchError: a sequence that is longer than `length`, or a length that can't be cut evenly.
        """
        rank = parallel or _ALONE
        sizes = _sizes(lengths)
        if length is None:
            length = _rounded(max(sizes, default=0), _alignment(align, rank, context))
        length = whole_number(length, "length")
        if not 0 <= length <= _MOST_TOKENS or any(size > length for size in sizes):
            raise MicroBatchError(
                "a sequence is longer than what the batch is padded to", expected=f"<= {length}", got=sizes
            )
        grid = torch.full((len(sizes), length), -1, dtype=torch.int64)
        one_of(side, ("right", "left"), "side", kind=MicroBatchError)
        for row, (first, size) in enumerate(zip(_starts(sizes), sizes, strict=True)):
            start = 0 if side == "right" else length - size
            grid[row, start : start + size] = torch.arange(first, first + size)
        here = _context_cut(grid, rank, context, "the padded length")
        return cls._of_places(here, order, sizes, fingerprints, parallel)

    @classmethod
    def packed(
        cls,
        lengths: Sequence[int],
        *,
        align: int | None = None,
        padded_lengths: Sequence[int] | None = None,
        align_end: int = 1,
        context: Context = "zigzag",
        parallel: ParallelLayout | None = None,
        fingerprints: Sequence[int] | None = None,
    ) -> TokenLayout:
        """The layout of packed sequences (thd): one after the other, each padded on the right.

        Args:
            lengths: tokens of each sequence.
            align: each is padded to a multiple of this; when not given, the least that `parallel` requires.
            padded_lengths: what each is padded to, instead of `align` (the differences of
                cu_seqlens_padded).
            align_end: the rank's stream is padded at its end to a multiple of this.
            context: "zigzag" cuts every sequence into two chunks a rank; "contiguous" cuts the whole stream
                into one piece a rank, after padding its end.
            parallel: which rank this is of how many; when not given, the only one.
            fingerprints: one for each sequence, held against those of the routes.

        Raises:
            MicroBatchError: a padded length that is too short or can't be cut evenly.
        """
        rank = parallel or _ALONE
        sizes = _sizes(lengths)
        if align is not None and padded_lengths is not None:
            raise MicroBatchError(
                "a sequence is padded by one rule", expected="align or padded_lengths", got="both"
            )
        padded = _padded_sizes(sizes, _alignment(align, rank, context), padded_lengths)
        pieces = []
        for number, (first, size, room) in enumerate(zip(_starts(sizes), sizes, padded, strict=True)):
            slots = torch.full((room,), -1, dtype=torch.int64)
            slots[:size] = torch.arange(first, first + size)
            if context == "zigzag":
                slots = _context_cut(slots, rank, context, f"sequence {number}")
            pieces.append(slots)
        stream = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)
        if context == "zigzag":
            here = _end_padded(stream, align_end)
        else:
            stream = _end_padded(stream, align_end * rank.context_pieces(context))
            here = _context_cut(stream, rank, context, "the whole stream")
        return cls._of_places(here, "sequence", sizes, fingerprints, parallel)

    @classmethod
    def from_probe(
        cls,
        fn: probed_layout.Preprocessing,
        lengths: Sequence[int],
        *,
        order: Order = "sequence",
        parallel: ParallelLayout | None = None,
        tokens: Sequence[Any] | None = None,
        fingerprints: Sequence[int] | None = None,
    ) -> TokenLayout:
        """Read the layout off the caller's own preprocessing, by pushing token numbers through it.

            layout = TokenLayout.from_probe(lambda sequences: preprocess(sequences)["input_ids"], lengths)

        Args:
            fn: takes one int64 tensor a sequence, numbers in the place of token ids, and returns what
                this rank's model is fed: [rows], [1, rows] or [batch, sequence]. It is called twice, with
                other numbers, none of which is a token id. What it returns beside them is padding.
            lengths: tokens of each sequence.
            order: how the model flattens [batch, sequence].
            parallel: the sequence-parallel slice is taken here, since the model takes it after its embedding.
                Context parallelism is `fn`'s own business; a rank may then have padding only.
            tokens: the real token ids of each sequence. With them `fn` is called once more, and has to put
                them into the same rows: code that treats some ids apart (a mask of ids != pad) is found.
            fingerprints: one for each sequence, held against those of the routes.

        Raises:
            MicroBatchError: `fn` returns something else, a token twice, or another layout the second time.
        """
        sizes = _sizes(lengths)
        rank = parallel or _ALONE
        places = probed_layout.places(fn, sizes, tokens=tokens, padding_alone=rank.cp > 1)
        return cls._of_places(places, order, sizes, fingerprints, parallel)

    @classmethod
    def _of_places(
        cls,
        places: torch.Tensor,
        order: Order,
        sizes: tuple[int, ...],
        fingerprints: Sequence[int | None] | None,
        parallel: ParallelLayout | None,
    ) -> TokenLayout:
        """From what this rank's model is called with: packed tokens, [rows] or [batch, sequence]."""
        rank = parallel or _ALONE
        rows = _sequence_slice(places, rank) if places.dim() == 1 else _flattened(places, order, rank)
        alike = places.dim() == 1 or 1 in places.shape
        whole = places.reshape(-1) if rank.cp == 1 else None
        return cls(rows, sizes, fingerprints, parallel, None if alike else order, whole)

    def gather(
        self,
        batch: Sequence[RoutedExperts | None],
        *,
        layers: Sequence[int] | None = None,
        on_bad_route: Literal["error", "native"] = "error",
        ceiling: float = 0.01,
    ) -> RoutedExperts:
        """The routes in the router's rows, from one RoutedExperts a sequence.

        A sequence may have one row fewer than tokens: the last token is never fed to the rollout engine,
        so it has no route. Padding has none either.

        Args:
            batch: one a sequence, in the order of the lengths; with on_bad_route="native" also None, or one
                without any recorded row (`RoutedExperts.unrecorded`), for a sequence without routes.
            layers: only these decoder layers (`ParallelLayout.moe_layers`); all when not given.
            on_bad_route: "native" lets the router choose for a sequence whose routes can't be used, and logs
                how many there were; see `bad_routes`.
            ceiling: the share of sequences up to which it may; above 0, it always may for one of several.

        Raises:
            MicroBatchError: another number of sequences or of tokens, another sequence's routes, or too many
                bad ones.
        """
        one_of(on_bad_route, ("error", "native"), "on_bad_route", kind=MicroBatchError)
        ceiling = share(ceiling, "ceiling", "samples", kind=MicroBatchError)
        wanted = None
        if layers is not None:
            wanted = tuple(whole_number(layer, "a layer") for layer in listed(layers, "the layers"))
        bad = self.bad_routes(batch, layers=wanted)
        if bad:
            bad_samples.check_ceiling(bad, len(batch), 0.0 if on_bad_route == "error" else ceiling)
        real = {n: routes for n, routes in enumerate(batch) if isinstance(routes, RoutedExperts)}
        good = {n: routes for n, routes in real.items() if n not in bad}
        if not real:
            raise next(iter(bad.values()), MicroBatchError("an empty batch", expected=">= 1 sequence", got=0))
        if bad:
            bad_samples.warn(bad, len(batch))
        if good:
            gathered = RoutedExperts.concat(list(good.values()), wanted).take(self._rows_in(good))
        else:
            like = next(iter(real.values()))  # a bad one still tells top-k and experts
            labels = like.layers if wanted is None else wanted
            gathered = RoutedExperts.unrecorded(
                len(self.rows), layers=labels, topk=like.topk, num_experts=like.num_experts
            )
        if self.fingerprints is None and any(routes.fingerprint is not None for routes in real.values()):
            _say_unchecked()
        gathered._about(bad_samples=len(bad), row_order=self.order)
        if self.fed is not None and self.fingerprints is not None:
            gathered._about(inputs=LaidOut(self.fed, self.lengths, self.fingerprints))
        return gathered

    def bad_routes(
        self, batch: Sequence[RoutedExperts | None], *, layers: Sequence[int] | None = None
    ) -> dict[int, ReplayError]:
        """The sequences whose routes can't be used, and why each can't.

        Raises:
            MicroBatchError: another number of sequences than the layout has.
        """
        return bad_samples.find(batch, self.lengths, self.fingerprints, layers)

    def scatter(self, routes: RoutedExperts) -> list[RoutedExperts]:
        """One RoutedExperts a sequence, from the router's rows; the inverse of `gather`.

        A token without a row here (another rank has it) is not recorded.

        Raises:
            MicroBatchError: another number of rows than the layout has.
        """
        return self.sequences(self.packed_rows(routes))

    def packed_rows(self, routes: RoutedExperts) -> RoutedExperts:
        """The routes in packed order, one row a token, from the router's rows."""
        if not isinstance(routes, RoutedExperts):
            raise MicroBatchError("these are no routes", expected="RoutedExperts", got=shown(routes))
        if len(routes) != len(self.rows):
            raise MicroBatchError(
                "the routes have another number of rows than the layout",
                expected=len(self.rows),
                got=len(routes),
                cause="a layout made for other lengths, or another padding",
            )
        row_of = torch.full((sum(self.lengths),), -1, dtype=torch.int64)
        filled = self.rows >= 0
        row_of[self.rows[filled]] = filled.nonzero()[:, 0]
        return routes.take(row_of)

    def sequences(self, packed: RoutedExperts) -> list[RoutedExperts]:
        """Packed routes cut into sequences, each with its fingerprint."""
        marks = self.fingerprints or (None,) * len(self.lengths)
        spans = pairwise((*_starts(self.lengths), sum(self.lengths)))
        return [packed.sequence(a, b, mark) for (a, b), mark in zip(spans, marks, strict=True)]

    def _rows_in(self, good: dict[int, RoutedExperts]) -> torch.Tensor:
        """The layout's rows as an index into the good sequences' routes, one after the other."""
        if tuple(map(len, good.values())) == self.lengths:
            return self.rows
        place = torch.full((sum(self.lengths) + 1,), -1, dtype=torch.int64)  # the last for rows of padding
        starts = _starts(self.lengths)
        first = 0
        for number, routes in good.items():
            place[starts[number] : starts[number] + len(routes)] = torch.arange(first, first + len(routes))
            first += len(routes)
        return place[self.rows]


@functools.cache
def _say_unchecked() -> None:
    _log.warning(
        "[npu_replay] these routes know which tokens they belong to, and nothing holds them against the "
        "batch: a shuffled or retokenised one would pass. Give the layout "
        "fingerprints=[npu_replay.fingerprint(tokens) for tokens in sequences]"
    )


def _marks(fingerprints: Sequence[int | None]) -> tuple[int | None, ...]:
    marks = listed(fingerprints, "fingerprints")
    return tuple(None if mark is None else whole_number(mark, "a fingerprint") for mark in marks)


def _sizes(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(_size(size, "a sequence's length") for size in listed(lengths, "the lengths"))


def _size(given: object, what: str) -> int:
    size = whole_number(given, what)
    if not 0 <= size <= _MOST_TOKENS:
        problem = "a sequence has a negative length" if size < 0 else f"{what} is no number of tokens"
        raise MicroBatchError(problem, expected=f">= 0, and at most {_MOST_TOKENS}", got=size)
    return size


def _starts(sizes: tuple[int, ...]) -> list[int]:
    """The first packed token of each sequence."""
    return list(accumulate(sizes[:-1], initial=0)) if sizes else []


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _alignment(align: int | None, parallel: ParallelLayout, context: Context) -> int:
    least = parallel.alignment(context)
    if align is None:
        return least
    align = whole_number(align, "align")
    if not 1 <= align <= _MOST_TOKENS:
        raise MicroBatchError("nothing can be padded to a multiple of this", expected=">= 1", got=align)
    return align


def _padded_sizes(
    sizes: tuple[int, ...], align: int, padded_lengths: Sequence[int] | None
) -> tuple[int, ...]:
    if padded_lengths is None:
        return tuple(_rounded(size, align) for size in sizes)
    padded = _sizes(padded_lengths)
    if len(padded) != len(sizes) or any(room < size for room, size in zip(padded, sizes, strict=True)):
        raise MicroBatchError(
            "padded_lengths don't add up with the lengths",
            expected=f"{len(sizes)} numbers, none below {sizes}",
            got=padded,
            cause="cu_seqlens_padded of another micro-batch",
        )
    return padded


def _end_padded(stream: torch.Tensor, multiple: int) -> torch.Tensor:
    if multiple < 1:
        raise MicroBatchError("nothing can be padded to a multiple of this", expected=">= 1", got=multiple)
    lacking = _rounded(len(stream), multiple) - len(stream)
    return torch.cat([stream, torch.full((lacking,), -1, dtype=torch.int64)])


def _context_cut(slots: torch.Tensor, parallel: ParallelLayout, context: Context, what: str) -> torch.Tensor:
    """This rank's part of the last dimension."""
    pieces = parallel.context_pieces(context)
    if pieces == 1:
        return slots
    _check_even(slots.shape[-1], pieces, what, f"context parallel {parallel.cp}, {context}")
    first = parallel.cp_rank
    mine = [first] if context == "contiguous" else [first, pieces - 1 - first]
    cut = slots.reshape(*slots.shape[:-1], pieces, slots.shape[-1] // pieces)
    return cut[..., mine, :].flatten(-2)


def _flattened(grid: torch.Tensor, order: Order, parallel: ParallelLayout) -> torch.Tensor:
    """[batch, sequence] in the order of the router's rows, and of these this rank's slice."""
    one_of(order, ("sequence", "batch"), "order", kind=MicroBatchError)
    if order == "sequence":
        return _sequence_slice(grid.T, parallel).reshape(-1)
    if parallel.slices_rows > 1:
        raise MicroBatchError(
            "sequence parallelism slices sequence-major rows",
            expected="order='sequence'",
            got="order='batch'",
        )
    return grid.reshape(-1)


def _sequence_slice(rows: torch.Tensor, parallel: ParallelLayout) -> torch.Tensor:
    """The sequence-parallel rank's slice along the first dimension."""
    parts = parallel.slices_rows
    if parts == 1:
        return rows
    _check_even(rows.shape[0], parts, "what this rank has of the sequence", f"sequence parallel {parts}")
    size = rows.shape[0] // parts
    return rows[parallel.tp_rank * size : (parallel.tp_rank + 1) * size]


def _check_even(size: int, parts: int, what: str, why: str) -> None:
    if size % parts:
        raise MicroBatchError(
            f"{what} can't be cut evenly ({why})",
            expected=f"a multiple of {parts}",
            got=size,
            cause="padding to another multiple than the trainer's: align= or length= is what it pads to",
        )


def _check_rows(rows: torch.Tensor, tokens: int) -> None:
    if rows.dim() != 1:
        raise MicroBatchError("the rows of a layout are a flat list", expected="[rows]", got=list(rows.shape))
    held = rows[rows >= 0]
    if len(rows) and (int(rows.min()) < -1 or int(rows.max()) >= tokens):
        raise MicroBatchError(
            "the layout has a row for a token that isn't there",
            expected=f"-1 to {tokens - 1}: the lengths add up to {tokens} tokens",
            got=f"{int(rows.min())} to {int(rows.max())}",
            cause="lengths of another micro-batch",
        )
    counts = torch.bincount(held, minlength=1)
    if int(counts.max()) > 1:
        token = int(counts.argmax())
        raise MicroBatchError(
            "the layout overlaps itself: a token sits in two rows",
            where=f"token {token}, rows {(rows == token).nonzero()[:, 0].tolist()}",
            expected="each token in one row at most",
            got=int(counts.max()),
            cause="padding that repeats a token, or slices of two ranks in one layout",
        )
