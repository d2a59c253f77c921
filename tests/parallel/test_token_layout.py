"""TokenLayout: which token sits in which row of the router, on every rank, and whose routes it gets."""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import slow_layout
from choice import examples
from npu_replay import ParallelLayout, ReplayError, RoutedExperts, TokenLayout, fingerprint
from npu_replay.errors import InvalidRoutes, MicroBatchError

LAYERS, EXPERTS, TOPK = (1, 4), 8, 2
MAKERS = (TokenLayout.padded, TokenLayout.packed)


def routes(tokens: int, seed: int, **about: Any) -> RoutedExperts:
    layers, experts = about.pop("layers", LAYERS), about.pop("num_experts", EXPERTS)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, len(layers), experts, generator=generator).topk(about.pop("topk", TOPK)).indices
    return RoutedExperts(ids=ids, layers=layers, num_experts=experts, **about)


def says(*words: str) -> str:
    """A pattern for a message that has all these words, in this order."""
    return "(?s)" + ".*".join(re.escape(word) for word in words)


def cells(layout: TokenLayout) -> list[slow_layout.Cell]:
    return [None if token < 0 else token for token in layout.rows.tolist()]


class Cut(NamedTuple):
    """How a job cuts its rows."""

    tp: int
    cp: int
    sequence_parallel: bool
    gathers_rows: bool
    context: str

    @property
    def slices(self) -> bool:
        return self.sequence_parallel and not self.gathers_rows

    @property
    def least(self) -> int:
        """What a sequence has to be a multiple of at least, so that every rank gets an equal share."""
        pieces = 1 if self.cp == 1 else 2 * self.cp if self.context == "zigzag" else self.cp
        return next(
            n
            for n in range(1, 1000)
            if n % pieces == 0 and n // self.cp % (self.tp if self.slices else 1) == 0
        )

    def ranks(self) -> Iterator[tuple[ParallelLayout, dict[str, Any]]]:
        """Every rank, for TokenLayout and for slow_layout."""
        for cp_rank in range(self.cp):
            for tp_rank in range(self.tp):
                place = {"tp": self.tp, "tp_rank": tp_rank, "cp": self.cp, "cp_rank": cp_rank}
                parallel = ParallelLayout(
                    **place, sequence_parallel=self.sequence_parallel, gathers_rows=self.gathers_rows
                )
                yield parallel, place | {"slices": self.slices}


CUTS = st.builds(
    Cut,
    tp=st.integers(1, 3),
    cp=st.integers(1, 3),
    sequence_parallel=st.booleans(),
    gathers_rows=st.booleans(),
    context=st.sampled_from(["zigzag", "contiguous"]),
)
LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=4)


class Batch(NamedTuple):
    """Sequences, how they are cut, and how they are padded.

    Attributes:
        cut: of the job.
        lengths: of the sequences.
        rooms: what each comes to be padded to.
        about: the arguments that say so.
        is_padded: to one length; else packed.
    """

    cut: Cut
    lengths: list[int]
    rooms: list[int]
    about: dict[str, Any]
    is_padded: bool

    def layout(self, parallel: ParallelLayout, **more: Any) -> TokenLayout:
        make = TokenLayout.padded if self.is_padded else TokenLayout.packed
        return make(self.lengths, context=self.cut.context, parallel=parallel, **self.about, **more)

    def slow(self, **place: Any) -> list[slow_layout.Cell]:
        """The same rows, one token at a time."""
        about: dict[str, Any] = {"context": self.cut.context, **place}
        if self.is_padded:
            about = {"side": self.about["side"], "order": self.about["order"]} | about
            return slow_layout.padded(self.lengths, self.rooms[0], **about)
        end = self.about.get("align_end", 1)
        return slow_layout.packed(self.lengths, self.rooms, align_end=end, **about)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    cut, lengths, is_padded = draw(CUTS), draw(LENGTHS), draw(st.booleans())
    how = draw(st.sampled_from(["told", "align", "least"]))
    align = cut.least * draw(st.integers(1, 3))
    if how == "least":
        sizes = {"tp": cut.tp, "cp": cut.cp, "sequence_parallel": cut.sequence_parallel}
        align = ParallelLayout(**sizes, gathers_rows=cut.gathers_rows).alignment(cut.context)
    wanted = [max(lengths)] * len(lengths) if is_padded else lengths
    more = draw(st.integers(0, 2)) * cut.least if how == "told" else 0
    rooms = [-(-length // align) * align + more for length in wanted]
    about: dict[str, Any] = {"align": align} if how == "align" else {}
    if is_padded:
        about["side"] = draw(st.sampled_from(["right", "left"]))
        sliced = cut.slices and cut.tp > 1
        about["order"] = "sequence" if sliced else draw(st.sampled_from(["sequence", "batch"]))
        return Batch(cut, lengths, rooms, about | ({"length": rooms[0]} if how == "told" else {}), True)
    if how == "told":
        rooms = [room + draw(st.integers(0, 2)) * cut.least for room in rooms]
        about["padded_lengths"] = rooms
    if draw(st.booleans()):
        about["align_end"] = (cut.tp if cut.slices else 1) * draw(st.integers(1, 5))
    return Batch(cut, lengths, rooms, about, False)


# The rows, by hand


def test_rows_are_sequence_major_for_megatron_and_batch_major_for_hugging_face() -> None:
    """T44: batch-major rows in a sequence-major router are wrong in silence."""
    assert TokenLayout.padded([3, 2], 4).rows.tolist() == [0, 3, 1, 4, 2, -1, -1, -1]
    assert TokenLayout.padded([3, 2], 4, order="batch").rows.tolist() == [0, 1, 2, -1, 3, 4, -1, -1]
    assert TokenLayout.padded([3, 2], side="left").rows.tolist() == [0, -1, 1, 3, 2, 4]


def test_rows_of_packed_sequences() -> None:
    """T20, T24c: the padding of each sequence is between it and the next, [seq0, pad0, seq1, pad1]."""
    assert TokenLayout.packed([3, 2]).rows.tolist() == [0, 1, 2, 3, 4]
    assert TokenLayout.packed([3, 2], align=4).rows.tolist() == [0, 1, 2, -1, 3, 4, -1, -1]
    assert TokenLayout.packed([3, 2], padded_lengths=[5, 2]).rows.tolist() == [0, 1, 2, -1, -1, 3, 4]
    assert TokenLayout.packed([3, 2], align_end=4).rows.tolist() == [0, 1, 2, 3, 4, -1, -1, -1]


def test_a_sequence_of_one_token_fills_up_to_the_alignment() -> None:
    """T16: the padding is counted in tokens, whatever the shape of what hangs on one of them."""
    ranks = [ParallelLayout(cp=2, cp_rank=rank) for rank in range(2)]
    layouts = [TokenLayout.packed([1], parallel=rank) for rank in ranks]
    assert [layout.rows.tolist() for layout in layouts] == [[0, -1], [-1, -1]]
    one = routes(1, 1)
    gathered = [layout.gather([one]) for layout in layouts]
    assert [g.recorded.tolist() for g in gathered] == [[True, False], [False, False]]
    assert [g.ids.shape for g in gathered] == [(2, 2, 2)] * 2
    assert torch.equal(gathered[0].ids[0], one.ids[0])


def test_the_padding_multiple_follows_tp_and_cp_not_dp() -> None:
    """T27: 7808 rows or 7744, as padding to a multiple of 128 or of 64 gives them."""
    sizes = {"tp": 8, "cp": 4, "sequence_parallel": True, "dp": 16}
    least = TokenLayout.packed([7700], parallel=ParallelLayout(**sizes))
    assert len(least.rows) == 7744 // 32
    more = TokenLayout.packed([7700], align=128, parallel=ParallelLayout(**sizes))
    assert len(more.rows) == 7808 // 32
    with pytest.raises(MicroBatchError, match=says("another number of rows", "Expected 242, got 244")):
        least.scatter(routes(len(more.rows), 1))


# The rows, of every rank, against one token at a time


@examples(400)
@given(batch=batches())
def test_rows_are_those_of_one_token_at_a_time(batch: Batch) -> None:
    """T16, T17, T20, T44, T46: every rank's rows."""
    for parallel, place in batch.cut.ranks():
        layout = batch.layout(parallel)
        assert cells(layout) == batch.slow(**place)
        assert layout.lengths == tuple(batch.lengths)
        assert layout.rows.dtype == torch.int64


@examples(100)
@given(batch=batches(), seed=st.integers(0, 99))
def test_gather_and_scatter_over_all_ranks_give_every_token_its_route_back(batch: Batch, seed: int) -> None:
    """T17, T34, T46: on one rank exactly, or on each tensor-parallel rank where rows aren't sliced."""
    marks = [fingerprint([seed, number]) for number in range(len(batch.lengths))]
    sent = [routes(length, seed + n, fingerprint=marks[n]) for n, length in enumerate(batch.lengths)]
    held = [torch.zeros(length, dtype=torch.int64) for length in batch.lengths]
    for parallel, _ in batch.cut.ranks():
        layout = batch.layout(parallel, fingerprints=marks)
        back = layout.scatter(layout.gather(sent))
        for number, (ours, theirs) in enumerate(zip(back, sent, strict=True)):
            held[number] += ours.recorded
            assert torch.equal(ours.ids[ours.recorded], theirs.ids[ours.recorded])
            assert (ours.layers, ours.num_experts) == (theirs.layers, theirs.num_experts)
            assert ours.fingerprint == marks[number]
    times = 1 if batch.cut.slices else batch.cut.tp
    assert [counts.tolist() for counts in held] == [[times] * length for length in batch.lengths]


@examples(100)
@given(batch=batches(), data=st.data())
def test_gather_gives_each_row_the_route_of_its_token_in_the_layers_asked_for(
    batch: Batch, data: st.DataObject
) -> None:
    """T2, T27, T34: columns by label; no route for padding, for a last token, and where the engine had none.
    What was given is as it was."""
    recorded_layers = (0, 2, 3, 7)
    layers = tuple(layer for layer in recorded_layers if data.draw(st.booleans()))
    expected: list[list[list[int]] | None] = []  # of each token, the ids in each layer
    sent = []
    for number, length in enumerate(batch.lengths):
        short = length > 0 and data.draw(st.booleans())
        known = data.draw(st.lists(st.booleans(), min_size=length - short, max_size=length - short))
        if length > 1:  # none at all would be a bad sample
            known[data.draw(st.integers(0, len(known) - 1))] = True
        mask = torch.tensor(known, dtype=torch.bool)
        one = routes(length - short, number, layers=recorded_layers, recorded=mask)
        sent.append(one)
        columns = [one.layer_ids(layer).tolist() for layer in layers]
        for token in range(length):
            has_route = token < len(one) and known[token]
            expected.append([ids[token] for ids in columns] if has_route else None)
    for parallel, _ in batch.cut.ranks():
        layout = batch.layout(parallel)
        found = layout.gather(sent, layers=layers)
        assert found.layers == layers
        assert len(found) == len(layout.rows)
        rows = [None if token is None else expected[token] for token in cells(layout)]
        assert found.recorded.tolist() == [row is not None for row in rows]
        assert found.ids.tolist() == [row or [[0] * TOPK] * len(layers) for row in rows]
        found.ids.zero_()
    for number, one in enumerate(sent):
        assert torch.equal(
            one.ids, routes(len(one), number, layers=recorded_layers, recorded=one.recorded).ids
        )


# gather and scatter, by hand


def test_scatter_keeps_the_weight_version_and_carries_the_layouts_fingerprints() -> None:
    """T24e: what was recorded is told by its tokens, wherever the batch goes from here."""
    marks = [fingerprint([1, 2, 3]), fingerprint([4, 5])]
    recorded = routes(6, 1, weight_version=7)
    back = TokenLayout.padded([3, 2], fingerprints=marks).scatter(recorded)
    assert [one.fingerprint for one in back] == marks
    assert [one.weight_version for one in back] == [7, 7]
    assert [one.fingerprint for one in TokenLayout.padded([3, 2]).scatter(recorded)] == [None, None]


# Fingerprints


def test_routes_without_a_fingerprint_fit_any_tokens_and_a_mark_may_be_numpys_or_missing() -> None:
    layout = TokenLayout.packed([3, 2], fingerprints=[np.uint64(7), None])
    layout.gather([routes(3, 1, fingerprint=7), routes(2, 2, fingerprint=9)])
    one, two = layout.scatter(layout.gather([routes(3, 1), routes(2, 2)]))
    assert (one.fingerprint, two.fingerprint) == (7, None)
    assert RoutedExperts.from_bytes(one.to_bytes()).fingerprint == 7
    message = says("sequence 0: the routes belong to other tokens", "Usual cause: retokenised")
    with pytest.raises(MicroBatchError, match=message):
        layout.gather([routes(3, 1, fingerprint=8), routes(2, 2)])


@pytest.mark.parametrize("make", [*MAKERS, functools.partial(TokenLayout.from_probe, torch.cat)])
def test_two_sequences_that_changed_places_are_refused(make: Callable[..., TokenLayout]) -> None:
    """T24e, T30: equal lengths pass every count; only the fingerprint tells."""
    marks = [fingerprint([number]) for number in range(3)]
    first, second, third = (routes(4, number, fingerprint=mark) for number, mark in enumerate(marks))
    layout = make([4, 4, 4], fingerprints=marks)
    layout.gather([first, second, third])
    message = says("sequence 1: the routes belong to other tokens", f"{marks[1]:#018x}", f"{marks[2]:#018x}")
    with pytest.raises(MicroBatchError, match=message):
        layout.gather([first, third, second])


# What doesn't fit


def grid(**about: Any) -> TokenLayout:
    return TokenLayout.padded([3, 2], 4, **about)


def gathered(lengths: Sequence[int], batch: Any, **about: Any) -> RoutedExperts:
    return TokenLayout.packed(lengths).gather(batch, **about)


def probed(fn: Callable[[list[torch.Tensor]], Any], lengths: Sequence[int] = (3, 3)) -> TokenLayout:
    return TokenLayout.from_probe(fn, lengths)


def native(lengths: Sequence[int], batch: Any, **about: Any) -> RoutedExperts:
    return gathered(lengths, batch, on_bad_route="native", **about)


ONE = ([3], [routes(3, 1)])
TWO = ([3, 2], [routes(3, 1), routes(2, 2)])
SLICED = ParallelLayout(tp=2, sequence_parallel=True)
CP2 = ParallelLayout(cp=2)
Refused = dict[str, list[Callable[[], object]]]

REFUSED: Refused = {  # what is said, and of what
    # numbers of sequences, tokens and rows: T12, T13
    "another number of sequences | Expected 2 | got 1": [lambda: grid().gather([routes(3, 1)])],
    "another number of sequences | Expected 2 | got 3": [lambda: grid().bad_routes([None] * 3)],
    # T13: each part of a partial rollout with its whole prefix is longer than the sequence
    "sequence 0 | Expected 5 (or 4 | got 8": [
        lambda: gathered([5], [RoutedExperts.concat([routes(3, 1), routes(5, 2)])])
    ],
    "sequence 0 | Expected 3 (or 2 | got 1": [lambda: grid().gather([routes(1, 1), routes(2, 2)])],
    "sequence 0 | Expected 3 (or 2 | got 4": [lambda: grid().gather([routes(4, 1), routes(2, 2)])],
    "sequence 1 | number of tokens | cut after": [lambda: grid().gather([routes(3, 1), routes(4, 2)])],
    "another number of rows | Expected 8 | got 7": [lambda: grid().scatter(routes(7, 1))],
    "longer than what the batch is padded to": [lambda: TokenLayout.padded([3, 5], 4)],
    "empty batch | >= 1 sequence | got 0": [lambda: gathered([], [])],
    # no routes: T20; without any, nobody knows how many experts there are
    "sequence 1 | isn't RoutedExperts | got NoneType": [lambda: gathered([3, 2], [routes(3, 1), None])],
    "sequence 0 | isn't RoutedExperts | got Tensor": [lambda: gathered([3], [routes(3, 1).ids])],
    "routes are given as a list | [routes] was meant": [lambda: gathered([3], routes(3, 1))],
    "routes are given as a list | got NoneType": [lambda: gathered([3], None)],
    "sequence 0": [lambda: native([2, 2], [None] * 2, ceiling=1.0)],
    # the first bad one is named, whatever the ceiling, which is for "native"
    "sequence 0: | got 4": [
        lambda: gathered([2, 2], [routes(4, 1), None], ceiling=0.01),
        lambda: gathered([2, 2], [routes(4, 1), None], ceiling=1.0),
    ],
    # layers: T2, T27, the 1-based numbers of Megatron's layer_number too
    "sequence 0: nobody recorded decoder layer 2 | layers [1, 2] | got [1, 4] | pipeline stage": [
        lambda: gathered(*TWO, layers=[1, 2])
    ],
    "sequence 1: nobody recorded decoder layer 4": [
        lambda: gathered([3, 2], [routes(3, 1), routes(2, 2, layers=(1, 3))], layers=[1, 4])
    ],
    "sequence 1: these routes differ from the others in the batch | Usual cause": [
        lambda about=about: gathered([2] * 3, [routes(2, 1), routes(2, 2, **about), routes(2, 3)])
        for about in ({"topk": 3}, {"num_experts": 16}, {"layers": (1, 5)})
    ],
    # fingerprints: T24e
    "another number of fingerprints than sequences | Expected 2 | got": [
        lambda make=make, marks=marks: make([3, 2], fingerprints=marks)
        for make in MAKERS
        for marks in ([1], [1, 2, 3])
    ],
    # rows: T24c, two sequences never share a row, nor a token two
    "token 1, rows [1, 3] | overlaps itself | each token in one row | Usual cause": [
        lambda: TokenLayout(torch.tensor([0, 1, 2, 1]), (3,))
    ],
    "a row for a token that isn't there | add up to 3 tokens | Usual cause: lengths": [
        lambda rows=rows: TokenLayout(torch.tensor(rows), (2, 1)) for rows in ([0, 1, 2, 3], [0, -2, 1])
    ],
    "flat list | [rows] | got [1, 2]": [lambda: TokenLayout(torch.tensor([[0, 1]]), (2,))],
    "flat list | got []": [lambda: TokenLayout(torch.tensor(0), (2,))],
    "rows | whole numbers | torch.float32": [lambda: TokenLayout(torch.zeros(1), (1,))],
    # lengths and what they are padded to
    "negative length | >= 0 | got -2": [
        *(lambda make=make: make([3, -2]) for make in MAKERS),
        lambda: TokenLayout(torch.tensor([0]), [-2]),
        lambda: probed(torch.cat, [3, -2]),
        lambda: TokenLayout.packed([3, 2], padded_lengths=[4, -2]),
    ],
    "padded_lengths don't add up": [
        lambda rooms=rooms: TokenLayout.packed([3, 2], padded_lengths=rooms) for rooms in ([4], [4, 1])
    ],
    "bad align | 1 to | got 0": [
        *(lambda make=make: make([3, 2], align=0) for make in MAKERS),
        lambda: TokenLayout.packed([3, 2], align_end=0),
    ],
    "one rule | align or padded_lengths": [lambda: TokenLayout.packed([3], align=2, padded_lengths=[4])],
    "sequence 1 can't be cut evenly | got 6": [
        lambda: TokenLayout.packed([3, 5], padded_lengths=[4, 6], parallel=CP2)
    ],
    # words and shares
    "order | 'sequence' or 'batch' | 'time'": [lambda: grid(order="time")],
    "side | 'right' or 'left' | 'top'": [lambda: grid(side="top")],
    "on_bad_route | 'error' or 'native' | 'skip'": [lambda: gathered(*ONE, on_bad_route="skip")],
    "ceiling is a share | 0 to 1": [
        lambda bad=bad: gathered(*ONE, ceiling=bad) for bad in (-0.1, 50, float("nan"), "many", 10**400)
    ],
    # T44: Megatron slices along the sequence, which batch-major rows are not in order of
    "sequence-major | order='sequence' | order='batch'": [
        lambda: TokenLayout.padded([4, 4], order="batch", parallel=SLICED),
        lambda: TokenLayout.from_probe(torch.stack, [4, 4], order="batch", parallel=SLICED),
    ],
    # preprocessing that returns no token ids
    **{
        f"something else than token ids | integer tensor | {words}": [lambda fn=fn: probed(fn)]
        for words, fn in {
            "got dict": lambda sequences: {"input_ids": torch.cat(sequences)},
            "pick input_ids": lambda sequences: {"input_ids": torch.cat(sequences)},
            "got list": lambda sequences: sequences,
            "got torch.bfloat16 tensor": lambda sequences: torch.cat(sequences).bfloat16(),
            "got torch.bool tensor": lambda sequences: torch.cat(sequences) > 0,
            "got torch.int16 tensor": lambda sequences: torch.cat(sequences).to(torch.int16),
            "got object array": lambda sequences: torch.cat(sequences).numpy().astype(object),
        }.items()
    },
    "another shape | [rows], [1, rows] or [batch, sequence] | got [": [
        lambda shape=shape: probed(lambda sequences: torch.cat(sequences).reshape(shape), [3, 1])
        for shape in ((1, 1, 4), (2, 2, 1))
    ],
    "token 0, rows [0, 3] | overlaps itself": [
        lambda: probed(lambda sequences: torch.cat([*sequences, sequences[0][:1]]), [2, 1])
    ],
    # that changes the ids: a layout without any token would replay nothing, in silence
    "none of the token numbers came out | Usual cause": [
        lambda: probed(lambda sequences: torch.cat(sequences) % 1000),
        lambda: probed(lambda sequences: torch.cat(sequences).clamp(max=151_935)),
        lambda: TokenLayout.from_probe(
            lambda sequences: torch.cat(sequences).clamp(max=5) + torch.arange(4), [4], parallel=CP2
        ),
    ],
    # that looks at the ids: the second time it is given the same lengths and other numbers
    "other rows the second time | lengths alone | Usual cause: a shuffle": [
        lambda fn=fn: probed(fn)
        for fn in (
            lambda sequences: torch.cat(sequences).sort().values,
            lambda sequences: torch.cat(sorted(sequences, key=lambda one: int(one[0]))),
            lambda sequences: torch.cat([one[one % 3 == 0] for one in sequences]),
            lambda sequences: torch.cat(sequences)[None, : 4 + int(sequences[0][0]) % 2],
        )
    ],
}
BAD_LAYERS: Refused = {"order": [lambda bad=bad: gathered(*TWO, layers=bad) for bad in ([4, 1], [1, 1])]}
BAD_ARGUMENTS: Refused = {
    "context | 'zigzag' or 'contiguous' | 'ring'": [
        lambda: grid(context="ring"),
        lambda: TokenLayout.packed([3], context="ring"),
    ],
    "length must be a whole number | 2.7": [lambda make=make: make([2.7]) for make in MAKERS],
    "a fingerprint must be a whole number": [lambda: TokenLayout.packed([3], fingerprints=["x"])],
    "a layer label must be a whole number | 1.0": [lambda: gathered(*ONE, layers=[1.0])],
}


@pytest.mark.parametrize(
    ("kind", "words", "call"),
    [
        (kind, words, call)
        for kind, table in (
            (MicroBatchError, REFUSED),
            (InvalidRoutes, BAD_LAYERS),
            (ReplayError, BAD_ARGUMENTS),
        )
        for words, calls in table.items()
        for call in calls
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    kind: type[ReplayError], words: str, call: Callable[[], object]
) -> None:
    with pytest.raises(kind, match=says(*words.split(" | "))):
        call()


@pytest.mark.parametrize(
    ("sizes", "context", "length", "words"),
    [
        ({"cp": 2}, "zigzag", 6, ("context parallel 2, zigzag", "a multiple of 4", "got 6")),
        ({"cp": 2}, "contiguous", 5, ("context parallel 2, contiguous", "a multiple of 2", "got 5")),
        ({"tp": 4}, "zigzag", 6, ("sequence parallel 4", "a multiple of 4", "got 6")),
        ({"tp": 4, "cp": 2}, "zigzag", 12, ("sequence parallel 4", "a multiple of 4", "got 6")),
    ],
)
def test_a_length_that_cannot_be_cut_evenly_is_refused(
    sizes: dict[str, Any], context: Any, length: int, words: tuple[str, ...]
) -> None:
    parallel = ParallelLayout(**sizes, sequence_parallel="tp" in sizes)
    message = says("can't be cut evenly", *words, "Usual cause: padding")
    with pytest.raises(MicroBatchError, match=message):
        TokenLayout.padded([3, 2], length, context=context, parallel=parallel)
    if (context, parallel.cp) != ("contiguous", 2):  # there the whole stream is padded to what can be cut
        with pytest.raises(MicroBatchError, match=message):
            TokenLayout.packed([3], padded_lengths=[length], context=context, parallel=parallel)


# Sequences whose routes can't be used


def test_bad_routes_says_which_and_why() -> None:
    marks = [fingerprint([number]) for number in range(6)]
    layout = TokenLayout.packed([3] * 6, fingerprints=marks)
    batch = [
        routes(3, 0, fingerprint=marks[0]),
        None,
        routes(5, 2),
        routes(3, 3, fingerprint=marks[2]),
        routes(2, 4),
        routes(3, 5, topk=3),
    ]
    bad = layout.bad_routes(batch)
    assert list(bad) == [1, 2, 3, 5]
    assert all(isinstance(error, MicroBatchError) for error in bad.values())
    assert [error.where for error in bad.values()] == [f"sequence {number}" for number in bad]
    for number, words in {1: "NoneType", 2: "got 5", 3: "other tokens", 5: "differ from the others"}.items():
        assert words in str(bad[number])
    assert layout.bad_routes([routes(3, number) for number in range(6)]) == {}


def test_native_leaves_the_rows_of_a_bad_sequence_to_the_router(caplog: pytest.LogCaptureFixture) -> None:
    """T20, T24b: not recorded, the others in their own rows, and one warning that says so."""
    layout = TokenLayout.padded([3, 2, 4], 4)
    one, three = routes(3, 1), routes(4, 3)
    for missing in (None, routes(5, 2), routes(2, 2, topk=3)):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="npu_replay"):
            gathered = layout.gather([one, missing, three], on_bad_route="native", ceiling=0.34)
        grid = gathered.recorded.view(4, 3)
        assert grid.T.tolist() == [[True] * 3 + [False], [False] * 4, [True] * 4]
        ids = gathered.ids.view(4, 3, len(LAYERS), TOPK)
        assert torch.equal(ids[:3, 0], one.ids)
        assert torch.equal(ids[:, 2], three.ids)
        assert not ids[:, 1].any()
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert re.search(says("[npu_replay] 1 of 3 sequences", "equence 1: "), record.getMessage())


def test_bad_routes_asks_for_the_layers_that_gather_would() -> None:
    layout, one = TokenLayout.packed([2, 2]), routes(2, 0)
    for other, layers, bad in ((LAYERS, (1,), []), (LAYERS, (1, 5), [0, 1]), ((1, 5), (1, 4), [1])):
        assert list(layout.bad_routes([one, routes(2, 1, layers=other)], layers=layers)) == bad


@pytest.mark.parametrize(
    ("bad", "of", "ceiling"), [(1, 4, 0.25), (1, 100, 0.01), (29, 100, 0.29), (2, 3, 0.7)]
)
def test_native_stops_above_the_ceiling_and_not_at_it(bad: int, of: int, ceiling: float) -> None:
    """29 of 100 are 29 %, also in floating point."""
    layout = TokenLayout.packed([1] * of)

    def batch(count: int) -> list[RoutedExperts | None]:
        return [None] * count + [routes(1, number) for number in range(of - count)]

    gathered = layout.gather(batch(bad), on_bad_route="native", ceiling=ceiling)
    assert int(gathered.recorded.sum()) == of - bad
    message = says(
        f"{bad + 1} of {of} samples have routes that can't be used",
        f"at most {ceiling:.1%}",
        f"got {(bad + 1) / of:.1%}",
        "sequence 0",
        "Usual cause",
    )
    if bad + 1 < of:
        with pytest.raises(MicroBatchError, match=message):
            layout.gather(batch(bad + 1), on_bad_route="native", ceiling=ceiling)


def test_one_bad_sequence_of_several_is_no_share_and_all_of_them_are() -> None:
    """So one bad sample stops no job, and an engine whose samples are all bad does, in batches of one too."""
    TokenLayout.packed([3, 2]).gather([None, routes(2, 1)], on_bad_route="native")
    nothing = RoutedExperts.unrecorded(3, layers=LAYERS, topk=TOPK, num_experts=EXPERTS)
    with pytest.raises(MicroBatchError, match=says("1 of 1 samples", "one of several")):
        TokenLayout.packed([3]).gather([nothing], on_bad_route="native")
    with pytest.raises(MicroBatchError, match="sequence 0"):
        TokenLayout.packed([3, 2]).gather([None, routes(2, 1)], on_bad_route="native", ceiling=0)


@examples(50)
@given(batch=batches(), data=st.data())
def test_native_takes_nothing_from_the_good_sequences(batch: Batch, data: st.DataObject) -> None:
    """T24b: on every rank, each good sequence has the rows that it has without the bad ones."""
    fine = [data.draw(st.booleans()) for _ in batch.lengths]
    fine[data.draw(st.integers(0, len(fine) - 1))] = True
    whole = [routes(length, number) for number, length in enumerate(batch.lengths)]
    sent = [one if good else None for one, good in zip(whole, fine, strict=True)]
    for parallel, _ in batch.cut.ranks():
        layout = batch.layout(parallel)
        all_of_them = layout.scatter(layout.gather(whole))
        back = layout.scatter(layout.gather(sent, on_bad_route="native", ceiling=1))
        for ours, theirs, good in zip(back, all_of_them, fine, strict=True):
            assert ours == theirs if good else not ours.recorded.any()


# from_probe


def preprocess(sequences: Sequence[torch.Tensor], rows: Sequence[slow_layout.Cell], pad: int) -> list[int]:
    """What a trainer feeds its model: the token ids of these rows, and `pad` in the others."""
    flat = [int(token) for sequence in sequences for token in sequence]
    return [pad if token is None else flat[token] for token in rows]


PADS = st.sampled_from([0, -100, 1, 151_643, 2**31 - 1])
DTYPES = st.sampled_from([torch.int64, torch.int32])


@examples(300)
@given(batch=batches(), pad=PADS, dtype=DTYPES, wrapped=st.booleans())
def test_a_probe_finds_the_same_rows(batch: Batch, pad: int, dtype: torch.dtype, wrapped: bool) -> None:
    """T16, T17, T20, T27, T44: whatever the id of the padding; the caller cuts over context parallel ranks.
    [rows], [1, rows], or [batch, sequence] before the sequence-parallel slice."""
    for parallel, place in batch.cut.ranks():
        whole = batch.slow(**place | {"slices": False} | ({"order": "batch"} if batch.is_padded else {}))

        def fn(sequences: list[torch.Tensor], whole: list[slow_layout.Cell] = whole) -> torch.Tensor:
            ids = torch.tensor(preprocess(sequences, whole, pad), dtype=dtype)
            if batch.is_padded:
                return ids.reshape(len(batch.lengths), batch.rooms[0] // batch.cut.cp)
            return ids[None] if wrapped else ids

        order = batch.about.get("order", "sequence")
        layout = TokenLayout.from_probe(fn, batch.lengths, order=order, parallel=parallel)
        assert torch.equal(layout.rows, batch.layout(parallel).rows)


def test_a_probe_sees_sequences_in_another_order_and_tokens_that_were_dropped() -> None:
    """T12: the response was cut, the routes weren't; the probe tells the rows that are left."""

    def by_length_and_cut(sequences: list[torch.Tensor]) -> torch.Tensor:
        longest_first = sorted(sequences, key=len, reverse=True)
        return torch.cat([one[:3] for one in longest_first])

    layout = TokenLayout.from_probe(by_length_and_cut, [2, 5, 1])
    assert layout.rows.tolist() == [2, 3, 4, 0, 1, 7]
    batch = [routes(2, 0), routes(5, 1), routes(1, 2)]
    gathered = layout.gather(batch)
    assert torch.equal(gathered.ids[:3], batch[1].ids[:3])
    back = layout.scatter(gathered)
    assert [one.recorded.tolist() for one in back] == [[True] * 2, [True] * 3 + [False] * 2, [True]]


@pytest.mark.parametrize(
    "kind", [torch.Tensor.tolist, lambda ids: ids.numpy().astype(np.uint32), torch.Tensor.int]
)
def test_a_probe_hands_in_one_int64_tensor_a_sequence_twice(kind: Callable[[torch.Tensor], Any]) -> None:
    """And takes lists and arrays."""
    seen: list[list[torch.Tensor]] = []

    def fn(sequences: list[torch.Tensor]) -> Any:
        seen.append([one.clone() for one in sequences])
        ids = torch.cat(sequences)
        for one in sequences:
            one.zero_()  # preprocessing may write into what it is given
        return kind(ids)

    lengths = [3, 0, 2]
    assert TokenLayout.from_probe(fn, lengths).rows.tolist() == [0, 1, 2, 3, 4]
    assert len(seen) == 2
    for sequences in seen:
        assert [len(one) for one in sequences] == lengths
        assert all(one.dtype == torch.int64 for one in sequences)
    first, second = (torch.cat(sequences) for sequences in seen)
    assert not (first == second).any()
    assert int(torch.cat([first, second]).max()) < 2**31, "preprocessing may make them int32"
    assert int(torch.cat([first, second]).min()) > 1_000_000, "no vocabulary's ids, a padding id among them"


def test_routes_without_a_single_recorded_row_are_bad_ones() -> None:
    """T27, T28: an engine that captured nothing, or an aborted sample, is no native replay in silence."""
    nothing = RoutedExperts.unrecorded(3, layers=LAYERS, topk=TOPK, num_experts=EXPERTS)
    layout = TokenLayout.packed([3, 3])
    with pytest.raises(MicroBatchError, match=says("sequence 1: no row of these routes is recorded")):
        layout.gather([routes(3, 1), nothing])
    alone = TokenLayout.packed([3]).gather([nothing], on_bad_route="native", ceiling=1.0)
    assert alone == nothing  # the caller says that it was counted over the rollout
    short = TokenLayout.packed([4]).gather([routes(2, 1)], layers=[1], on_bad_route="native", ceiling=1.0)
    assert (short.recorded.tolist(), short.layers, short.num_experts) == ([False] * 4, (1,), EXPERTS)
    assert TokenLayout.packed([1]).gather([routes(1, 1).take([-1])]).recorded.tolist() == [False]


def test_a_layout_keeps_its_own_rows_and_takes_any_whole_numbers_as_lengths() -> None:
    rows = torch.tensor([0, 1, 2])
    for lengths in (np.array([2, 1]), torch.tensor([2, 1]), [2, 1]):
        layout = TokenLayout(rows.clone(), lengths)
        assert layout.lengths == (2, 1)
    layout = TokenLayout(rows, (3,))
    rows[0] = 2
    assert layout.rows.tolist() == [0, 1, 2]


def test_a_probe_with_the_real_tokens_finds_ids_that_are_treated_apart() -> None:
    """A mask of ids != pad drops that id inside the text too; numbers in its place never show it."""

    def masked(sequences: list[torch.Tensor]) -> torch.Tensor:
        grid = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=2)
        kept = grid[grid != 2]
        return torch.nn.functional.pad(kept, (0, -len(kept) % 8), value=2)

    tokens = [[5, 2, 7, 8, 2], [9, 4]]
    assert TokenLayout.from_probe(masked, [5, 2]).rows.tolist() == [0, 1, 2, 3, 4, 5, 6, -1]
    with pytest.raises(MicroBatchError, match=says("the real token ids into other rows", "ids != pad")):
        TokenLayout.from_probe(masked, [5, 2], tokens=tokens)
    fine = TokenLayout.from_probe(lambda sequences: torch.cat(sequences), [5, 2], tokens=tokens)
    assert fine.rows.tolist() == list(range(7))
    with pytest.raises(MicroBatchError, match=says("tokens and lengths differ")):
        TokenLayout.from_probe(masked, [5, 2], tokens=tokens[:1])


def test_repr_says_what_a_layout_holds() -> None:
    assert repr(TokenLayout.padded([3, 4])) == "TokenLayout(8 rows, 7 of the 7 tokens of 2 sequences)"
    rank = ParallelLayout(tp=2, tp_rank=1, sequence_parallel=True)
    layout = TokenLayout.padded([3, 4], parallel=rank, fingerprints=[1, 2])
    assert (
        repr(layout) == f"TokenLayout(4 rows, 3 of the 7 tokens of 2 sequences, with fingerprints, {rank!r})"
    )
