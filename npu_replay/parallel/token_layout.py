"""TokenLayout: maps each row of the router to its token.

Routes are moved like the tokens: by one index `row -> packed token or none`, and one gather. «Packed» means
the tokens of all sequences, one after the other, without padding.
"""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Literal, TypeAlias

import torch

from npu_replay.errors import MicroBatchError, ReplayError, one_of, share
from npu_replay.parallel import probed_layout, row_gather, slots
from npu_replay.parallel.parallel_layout import Context, ParallelLayout
from npu_replay.routes import arguments
from npu_replay.routes.checks import MAX_TOKENS
from npu_replay.routes.inputs import Inputs
from npu_replay.routes.places import read_batch
from npu_replay.routes.routed_experts import Placement, RoutedExperts

Order: TypeAlias = Literal["sequence", "batch"]
"""The way [batch, sequence] is flattened: sequence-major for Megatron's routers (s*b), batch-major for those
of Hugging Face (b*s)."""

_ALONE = ParallelLayout()
_check = MicroBatchError.unless

_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False, repr=False)
class TokenLayout:
    """Maps each row of the router to a packed token, for one rank and micro-batch.

    >>> npu_replay.TokenLayout(rows=[2, -1, 0, 1], lengths=[3])
    TokenLayout(4 rows, 3 of the 3 tokens of 1 sequences)

    Attributes:
        rows: int64 [rows], the packed token, or -1 for padding.
        lengths: tokens of each sequence.
        fingerprints: one per sequence, compared with those of the routes; None skips a sequence.
        parallel: the rank that it was made for, if given; `collect` compares it with its own.
        order: how [batch, sequence] became the rows; None if both orders give the same rows.
        fed: int64, the packed token in each place of the model's input, or -1 for padding; None if unknown,
            or if a rank has only a part of each sequence.

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
        sizes = _sizes(self.lengths)
        rows = torch.as_tensor(self.rows, device="cpu").detach()
        is_whole = rows.dtype in arguments.INTEGERS or not rows.numel()
        _check(is_whole, "the rows of a layout are whole numbers", "int64", rows.dtype)
        _check(rows.dim() == 1, "the rows of a layout are a flat list", "[rows]", list(rows.shape))
        rows = rows.to(torch.int64, copy=True)  # the caller may write into its own later
        least, most = (int(rows.min()), int(rows.max())) if len(rows) else (-1, -1)
        _check(
            least >= -1 and most < sum(sizes),
            "the layout has a row for a token that isn't there",
            f"-1 to {sum(sizes) - 1}: the lengths add up to {sum(sizes)} tokens",
            f"{least} to {most}",
            "lengths of another micro-batch",
        )
        counts = torch.bincount(rows[rows >= 0], minlength=1)  # a layout without tokens has a maximum, too
        most = int(counts.max())
        token = int(counts.argmax())
        _check(
            most <= 1,
            "the layout overlaps itself: a token sits in two rows",
            "each token in one row at most",
            most,
            "padding that repeats a token, or slices of two ranks in one layout",
            f"token {token}, rows {(rows == token).nonzero()[:, 0].tolist()}",
        )
        object.__setattr__(self, "lengths", sizes)
        object.__setattr__(self, "rows", rows)
        if self.fingerprints is not None:
            marks = tuple(self.fingerprints)
            object.__setattr__(self, "fingerprints", marks)
            _check(
                len(marks) == len(sizes),
                "another number of fingerprints than sequences",
                len(sizes),
                len(marks),
            )

    def __repr__(self) -> str:
        tokens = int((self.rows >= 0).sum())
        marks = ", with fingerprints" if self.fingerprints is not None else ""
        where = "" if self.parallel is None else f", {self.parallel!r}"
        holds = f"{tokens} of the {sum(self.lengths)} tokens of {len(self.lengths)} sequences"
        return f"TokenLayout({len(self.rows)} rows, {holds}{marks}{where})"

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
        """Return the layout of a padded batch [batch, length].

        >>> npu_replay.TokenLayout.padded([3, 2], 4).rows.tolist()
        [0, 3, 1, 4, 2, -1, -1, -1]

        Args:
            lengths: tokens of each sequence.
            length: the padded length, before any rank takes its part. When not given: the longest sequence,
                rounded up to a multiple of `align`.
            side: where the padding is.
            order: "sequence" for Megatron's routers (s*b), "batch" for those of Hugging Face (b*s).
            align: see `length`; when not given, the least that `parallel` requires.
            context: how context parallelism cuts the sequence dimension.
            parallel: this rank and the sizes of the axes; when not given, a single rank.
            fingerprints: one per sequence, compared with those of the routes.

        Raises:
            MicroBatchError: a sequence is longer than `length`, or a length can't be cut evenly.
        """
        rank = parallel or _ALONE
        sizes = _sizes(lengths)
        if length is None:
            length = slots.rounded(max(sizes, default=0), slots.alignment(align, rank, context))
        _check(
            0 <= max(sizes, default=0) <= length <= MAX_TOKENS,
            "a sequence is longer than what the batch is padded to",
            f"<= {length}",
            sizes,
        )
        one_of(side, ("right", "left"), "side", kind=MicroBatchError)
        grid = slots.joined(slots.padded_slots(sizes, [length] * len(sizes), side == "left")).view(
            len(sizes), length
        )
        here = slots.context_cut(grid, rank, context, "the padded length")
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
        """Return the layout of packed sequences (thd): one after the other, each padded on the right.

        >>> npu_replay.TokenLayout.packed([3, 2], align=4).rows.tolist()
        [0, 1, 2, -1, 3, 4, -1, -1]

        Args:
            lengths, parallel, fingerprints: as in `padded`.
            align: each is padded to a multiple of this; when not given, the least that `parallel` requires.
            padded_lengths: the padded length of each, instead of `align` (the differences of
                cu_seqlens_padded).
            align_end: the end of the rank's stream is padded to a multiple of this.
            context: "zigzag" cuts every sequence into two chunks per rank; "contiguous" cuts the whole stream
                into one piece per rank, after padding its end.

        Raises:
            MicroBatchError: a padded length is too short or can't be cut evenly.
        """
        rank = parallel or _ALONE
        sizes = _sizes(lengths)
        _check(
            align is None or padded_lengths is None,
            "a sequence is padded by one rule",
            "align or padded_lengths",
            "both",
        )
        multiple = slots.alignment(align, rank, context)
        end = slots.number_of_tokens(align_end, "align_end")
        rooms = tuple(slots.rounded(size, multiple) for size in sizes)
        if padded_lengths is not None:
            rooms = _sizes(padded_lengths)
            _check(
                len(rooms) == len(sizes) and all(map(operator.ge, rooms, sizes)),
                "padded_lengths don't add up with the lengths",
                f"{len(sizes)} numbers, none below {sizes}",
                rooms,
                "cu_seqlens_padded of another micro-batch",
            )
        pieces = slots.padded_slots(sizes, rooms)
        if context == "zigzag":
            parts = [
                slots.context_cut(piece, rank, context, f"sequence {n}") for n, piece in enumerate(pieces)
            ]
            here = slots.joined(parts, end)
        else:
            # The stream is padded before it is cut: so each rank's piece is a multiple of `align_end`.
            stream = slots.joined(pieces, end * rank.context_pieces(context))
            here = slots.context_cut(stream, rank, context, "the whole stream")
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
        """Read the layout off the caller's own preprocessing, by passing token numbers through it.

        >>> preprocess = lambda sequences: torch.cat(sequences[::-1])
        >>> npu_replay.TokenLayout.from_probe(preprocess, [2, 1]).rows.tolist()
        [2, 0, 1]

        Args:
            fn: takes one int64 tensor per sequence, with numbers in the place of token ids, and returns the
                input of this rank's model: [rows], [1, rows] or [batch, sequence]. It is called twice, with
                different numbers, none of which is a token id. Any other value in its result is padding.
            lengths, order, fingerprints: as in `padded`.
            parallel: the sequence-parallel slice is taken here, since the model takes it after its embedding.
                `fn` itself applies context parallelism; a rank may then have padding only.
            tokens: the real token ids of each sequence. With them `fn` is called once more and must put them
                into the same rows. This finds code that treats some ids differently (a mask of ids != pad).

        Raises:
            MicroBatchError: `fn` returns something else, a token twice, or another layout the second time.
        """
        sizes = _sizes(lengths)
        padding_alone = parallel is not None and parallel.cp > 1
        places = probed_layout.places(fn, sizes, tokens=tokens, padding_alone=padding_alone)
        return cls._of_places(places, order, sizes, fingerprints, parallel)

    @classmethod
    def of_batch(
        cls,
        input_ids: Any,
        attention_mask: Any = None,
        position_ids: Any = None,
        *,
        cu_seqlens: Any = None,
        order: Order = "batch",
        parallel: ParallelLayout | None = None,
    ) -> TokenLayout:
        """Read the layout off what the model is called with: a padded batch, or packed sequences.

        It takes tensors on any device, arrays and lists; the host waits for a device once.

        >>> ids, mask = torch.tensor([[0, 7, 8], [4, 5, 6]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
        >>> layout = npu_replay.TokenLayout.of_batch(ids, mask)
        >>> layout.lengths, layout.rows.tolist()
        ((2, 3), [-1, 0, 1, 2, 3, 4])

        Args:
            input_ids: the token ids, [batch, sequence] or [tokens].
            attention_mask: 0 for padding, of the same shape, on any side of a row. A batch that has padding
                needs it, also where the model is called without it. A row of padding alone is no sequence.
            position_ids: 0 where a sequence begins; packed sequences need them, or `cu_seqlens`. Those of
                images (M-RoPE, [3, batch, sequence]) need `attention_mask` or `cu_seqlens` beside them.
            cu_seqlens: where packed sequences begin, and where the last one ends.
            order: "batch" for routers of Hugging Face models (b*s), "sequence" for those of Megatron (s*b).
            parallel: as in `padded`, without context parallelism.

        Raises:
            MicroBatchError: these don't tell the sequences: a mask with holes, positions or `cu_seqlens` that
                contradict it or each other, or a packed end that may be padding.
        """
        whole = parallel is None or parallel.cp == 1
        _check(
            whole,
            "a rank has a part of each sequence",
            "whole sequences",
            f"{parallel!r}",
            "context parallelism: TokenLayout.padded and .packed cut sequences as it does",
            "TokenLayout.of_batch",
        )
        try:
            places, sizes, marks = read_batch(input_ids, attention_mask, position_ids, cu_seqlens)
        except MicroBatchError as error:
            raise error.at("TokenLayout.of_batch") from None
        return cls._of_places(places, order, sizes, marks, parallel)

    @classmethod
    def _of_places(
        cls,
        places: torch.Tensor,
        order: Order,
        sizes: tuple[int, ...],
        fingerprints: Sequence[int | None] | None,
        parallel: ParallelLayout | None,
    ) -> TokenLayout:
        """Make a layout from the input of this rank's model: packed tokens, [rows] or [batch, sequence]."""
        rank = parallel or _ALONE
        one_of(order, ("sequence", "batch"), "order", kind=MicroBatchError)
        batch_major = order == "batch" and places.dim() == 2
        # A slice is of the sequence dimension, whose places are no neighbours in batch-major rows.
        slices = rank.slices_rows
        _check(
            not batch_major or slices == 1,
            "sequence parallelism slices sequence-major rows",
            "order='sequence'",
            "order='batch'",
        )
        what = "what this rank has of the sequence"
        why = f"sequence parallel {slices}"
        here = slots.cut(places, slices, [rank.tp_rank], what, why)
        rows = (here if batch_major or here.dim() == 1 else here.T).reshape(-1)
        alike = places.dim() == 1 or 1 in places.shape  # both orders then give the same rows
        # `fed` is compared with whole sequences, of which context parallelism leaves a rank a part.
        fed = places.reshape(-1) if rank.cp == 1 else None
        return cls(rows, sizes, fingerprints, parallel, None if alike else order, fed)

    def gather(
        self,
        batch: Sequence[RoutedExperts | None],
        *,
        layers: Sequence[int] | None = None,
        on_bad_route: Literal["error", "native"] = "error",
        ceiling: float = row_gather.CEILING,
    ) -> RoutedExperts:
        """Return the routes in the router's rows, from one RoutedExperts per sequence.

        A sequence may have one row fewer than tokens: the last token is never fed to the rollout engine, so
        it has no route. Padding has none either.

        >>> routes = npu_replay.RoutedExperts(ids=torch.tensor([[[5]], [[6]]]), layers=[0], num_experts=8)
        >>> rows = npu_replay.TokenLayout.padded([2], 3).gather([routes])
        >>> rows.ids.flatten().tolist(), rows.recorded.tolist()
        ([5, 6, 0], [True, True, False])

        Args:
            batch: one per sequence, in the order of the lengths. With on_bad_route="native" None, or one
                without any recorded row (`RoutedExperts.unrecorded`), stands for a sequence without routes.
            layers: only these decoder layers (`ParallelLayout.moe_layers`); all when not given.
            on_bad_route: "native" lets the router choose for a sequence whose routes can't be used, and logs
                how many there were; see `bad_routes`.
            ceiling: the largest share of sequences without usable routes; above 0, one of several may be.

        Raises:
            MicroBatchError: another number of sequences or of tokens, another sequence's routes, or too many
                bad ones.
        """
        one_of(on_bad_route, ("error", "native"), "on_bad_route", kind=MicroBatchError)
        ceiling = share(ceiling, "ceiling", "samples", kind=MicroBatchError)
        layers = None if layers is None else arguments.labels(layers)
        if bad := self.bad_routes(batch, layers=layers):
            row_gather.tolerate(bad, len(batch), 0.0 if on_bad_route == "error" else ceiling)
        real = {n: routes for n, routes in enumerate(batch) if isinstance(routes, RoutedExperts)}
        if not real:
            empty = MicroBatchError(
                "an empty batch",
                expected=">= 1 sequence",
                got=0,
                cause="a micro-batch of padding alone, which tells no layers and no top-k: give the block "
                "RoutedExperts.unrecorded(len(layout.rows), layers=..., topk=..., num_experts=...)",
            )
            raise next(iter(bad.values()), empty)
        good = {n: routes for n, routes in real.items() if n not in bad}
        like = next(iter((good or real).values()))  # a bad one still has top-k and experts
        labels = like.layers if layers is None else layers
        gathered = self.rows_of(good, layers=labels, topk=like.topk, num_experts=like.num_experts)
        inputs = self.inputs if self.fingerprints is not None else self._inputs_of(good)
        unknown = inputs is None or not inputs.tells_tokens
        if unknown and any(routes.fingerprint is not None for routes in real.values()):
            _say_unchecked()
        placement = Placement(
            bad_samples=len(bad),
            row_order=self.order,
            inputs=inputs,
            rows=self.rows,
            lengths=self.lengths,
            unnamed=any(routes.fingerprint is None for routes in good.values()),
        )
        return gathered.with_known(placement=placement)

    @property
    def inputs(self) -> Inputs | None:
        """Return what the model is called with: places, and fingerprints if known; None without places."""
        marks = (None,) * len(self.lengths) if self.fingerprints is None else self.fingerprints
        return None if self.fed is None else Inputs(self.fed, self.lengths, marks)

    def _inputs_of(self, good: Mapping[int, RoutedExperts]) -> Inputs | None:
        """Return what the model is called with, by the fingerprints of the routes; None without places.

        Rows that all have a route may lack one more token of their fingerprint, unless they were recorded.
        """
        if self.fed is None:
            return None
        marks: list[int | None] = [None] * len(self.lengths)
        for number, routes in good.items():
            may_lack = routes.placement.inputs is None and bool(routes.recorded[-1:].all())
            if len(routes) < self.lengths[number] or not may_lack:
                marks[number] = routes.fingerprint
        return Inputs(self.fed, self.lengths, marks)

    def rows_of(
        self, good: Mapping[int, RoutedExperts], *, layers: Sequence[int], topk: int, num_experts: int
    ) -> RoutedExperts:
        """Return in the router's rows the routes of sequences, by number, that `bad_routes` accepts."""
        if good:
            made = row_gather.pick(self._runs, len(self.rows), good, layers)
        else:
            made = RoutedExperts.unrecorded(len(self.rows), layers=layers, topk=topk, num_experts=num_experts)
        return made.with_known(placement=Placement(rows=self.rows, lengths=self.lengths))

    @functools.cached_property
    def _runs(self) -> list[row_gather.Run]:
        return row_gather.plan(self.rows, self.lengths)

    def bad_routes(
        self, batch: Sequence[RoutedExperts | None], *, layers: Sequence[int] | None = None
    ) -> dict[int, ReplayError]:
        """Return the sequences whose routes can't be used, with the error of each.

        >>> npu_replay.TokenLayout.packed([3]).bad_routes([None])[0].problem
        "this isn't RoutedExperts"

        Raises:
            MicroBatchError: another number of sequences than the layout has.
        """
        return row_gather.find_bad(batch, self.lengths, self.fingerprints, layers)

    def scatter(self, routes: RoutedExperts) -> list[RoutedExperts]:
        """Return one RoutedExperts per sequence, from the router's rows; the inverse of `gather`.

        A token without a row here (another rank has it) is not recorded.

        >>> layout = npu_replay.TokenLayout(rows=[1, 0], lengths=[2])
        >>> rows = npu_replay.RoutedExperts(ids=torch.tensor([[[3]], [[5]]]), layers=[0], num_experts=8)
        >>> layout.scatter(rows)[0].ids.flatten().tolist()
        [5, 3]

        Raises:
            MicroBatchError: another number of rows than the layout has.
        """
        return self.sequences(routes.take(self.row_of(routes)))

    def row_of(self, routes: RoutedExperts, where: str = "") -> torch.Tensor:
        """Return the row of each packed token among these rows, or -1: int64 [tokens]."""
        _check(
            len(routes) == len(self.rows),
            "the routes have another number of rows than the layout",
            len(self.rows),
            len(routes),
            "a layout made for other lengths, another padding, or another rank",
            where,
        )
        row_of = torch.full((sum(self.lengths),), -1, dtype=torch.int64, device="cpu")
        filled = self.rows >= 0
        row_of[self.rows[filled]] = filled.nonzero()[:, 0]
        return row_of

    def sequences(self, packed: RoutedExperts) -> list[RoutedExperts]:
        """Cut packed routes into sequences, each with its fingerprint."""
        marks = self.fingerprints or (None,) * len(self.lengths)
        spans = pairwise(accumulate(self.lengths, initial=0))
        return [packed.sequence(a, b, mark) for (a, b), mark in zip(spans, marks, strict=True)]


# Cached: the process warns once.
@functools.cache
def _say_unchecked() -> None:
    _log.warning(
        "[npu_replay] these routes know which tokens they belong to, and nothing holds them against the "
        "batch: a shuffled or retokenised one would pass. Give the layout "
        "fingerprints=[npu_replay.fingerprint(tokens) for tokens in sequences]"
    )


def _sizes(lengths: Sequence[int]) -> tuple[int, ...]:
    return tuple(slots.number_of_tokens(size, "length of a sequence", least=0) for size in lengths)
