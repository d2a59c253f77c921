"""TokenLayout: which token sits in which row of the router, on every rank, and whose routes it gets."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from choice import examples
from npu_replay import ParallelLayout, ReplayError, RoutedExperts, TokenLayout, fingerprint
from npu_replay.errors import InvalidRoutes, MicroBatchError
from parallel.drawn_batches import Batch, Cell, batches
from zoo.outcome import random_routes

LAYERS = (1, 4)
EXPERTS = 8
TOPK = 2


def routes(
    tokens: int,
    seed: int,
    layers: Sequence[int] = LAYERS,
    num_experts: int = EXPERTS,
    topk: int = TOPK,
    **about: Any,
) -> RoutedExperts:
    return random_routes([tokens], layers, num_experts, topk, seed, **about)[0]


def cells(layout: TokenLayout) -> list[Cell]:
    return [None if token < 0 else token for token in layout.rows.tolist()]


@pytest.mark.parametrize(
    ("layout", "rows"),
    [
        # T44: batch-major rows in a sequence-major router are wrong in silence
        (TokenLayout.padded([3, 2], 4), [0, 3, 1, 4, 2, -1, -1, -1]),
        (TokenLayout.padded([3, 2], 4, order="batch"), [0, 1, 2, -1, 3, 4, -1, -1]),
        (TokenLayout.padded([3, 2], side="left"), [0, -1, 1, 3, 2, 4]),
        # T20, T24c: the padding of each sequence is between it and the next, [seq0, pad0, seq1, pad1]
        (TokenLayout.packed([3, 2], align=4), [0, 1, 2, -1, 3, 4, -1, -1]),
        (TokenLayout.packed([3, 2], padded_lengths=[5, 2]), [0, 1, 2, -1, -1, 3, 4]),
        (TokenLayout.packed([3, 2], align_end=4), [0, 1, 2, 3, 4, -1, -1, -1]),
        # T16: a sequence of one token fills up to the alignment
        (TokenLayout.packed([1], parallel=ParallelLayout(cp=2)), [0, -1]),
        (TokenLayout.packed([1], parallel=ParallelLayout(cp=2, cp_rank=1)), [-1, -1]),
    ],
)
def test_rows_by_hand(layout: TokenLayout, rows: list[int]) -> None:
    assert layout.rows.tolist() == rows


@examples(400)
@given(batch=batches())
def test_rows_are_those_of_one_token_at_a_time(batch: Batch) -> None:
    """T16, T17, T20, T44, T46: every rank's rows."""
    for rank in batch.ranks():
        layout = batch.layout(rank)
        assert cells(layout) == batch.slow(rank)
        assert (layout.lengths, layout.rows.dtype) == (tuple(batch.lengths), torch.int64)


@examples(200)
@given(batch=batches(), data=st.data())
def test_each_row_gets_the_route_of_its_token_and_each_token_gets_it_back(
    batch: Batch, data: st.DataObject
) -> None:
    """T2, T17, T24b, T27, T34, T46: columns by label; no route for padding, for a last token, where the
    engine had none, and for samples without routes. What was given is as it was."""
    known_layers = (0, 2, 3, 7)
    layers = tuple(layer for layer in known_layers if data.draw(st.booleans()))
    marks = [fingerprint([number]) for number in range(len(batch.lengths))]
    expected: list[list[list[int]] | None] = []  # of each token, the ids in each layer
    sent: list[RoutedExperts | None] = []
    for number, length in enumerate(batch.lengths):
        size = length - (length > 0 and data.draw(st.booleans()))
        known = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
        mask = torch.tensor(known, dtype=torch.bool)
        sample = routes(size, number, layers=known_layers, recorded=mask, fingerprint=marks[number])
        columns = [sample.layer_ids(layer).tolist() for layer in layers]
        missing = number > 0 and data.draw(st.booleans())
        sent.append(None if missing else sample)
        for token in range(length):
            has_route = not missing and token < size and known[token]
            expected.append([ids[token] for ids in columns] if has_route else None)
    if not any(expected):
        return
    total = sum(batch.lengths)
    mixed = data.draw(st.permutations([*range(total), -1, -1]))[: data.draw(st.integers(1, total + 2))]
    layouts = [batch.layout(rank, fingerprints=marks) for rank in batch.ranks()]
    for layout in [*layouts, TokenLayout(torch.tensor(mixed), batch.lengths, marks)]:
        micro_batch = layout.gather(sent, layers=layers, on_bad_route="native", ceiling=1)
        assert (micro_batch.layers, micro_batch.num_experts) == (layers, EXPERTS)
        rows = [None if token is None else expected[token] for token in cells(layout)]
        assert micro_batch.recorded.tolist() == [row is not None for row in rows]
        assert micro_batch.ids.tolist() == [row or [[0] * TOPK] * len(layers) for row in rows]
        back = layout.scatter(micro_batch)
        assert [sequence.fingerprint for sequence in back] == marks
        here = {*cells(layout)}
        tokens = [ids if token in here else None for token, ids in enumerate(expected)]
        together = RoutedExperts.concat(back)
        assert together.recorded.tolist() == [ids is not None for ids in tokens]
        assert together.ids[together.recorded].tolist() == [ids for ids in tokens if ids is not None]
        micro_batch.ids.zero_()
    for number, sample in enumerate(sent):
        if sample is not None:
            assert torch.equal(
                sample.ids, routes(len(sample), number, layers=known_layers, recorded=sample.recorded).ids
            )


@pytest.mark.parametrize("topk", [1, 2])
def test_tokens_with_many_gaps_between_them_have_their_routes_up_to_the_end(topk: int) -> None:
    """So many are looked up singly. The columns aren't neighbours, as those of virtual stages."""
    rows = [39, *[token for token in range(39) if token % 3]]
    sequence = routes(39, 1, layers=range(4), topk=topk)
    micro_batch = laid(rows, [40]).gather([sequence], layers=[0, 2])
    assert micro_batch.recorded.tolist() == [False] + [True] * 26
    assert torch.equal(micro_batch.ids[1:], sequence.ids[rows[1:]][:, [0, 2]])


def test_scatter_keeps_the_weight_version_and_carries_the_layouts_fingerprints() -> None:
    """T24e: what was recorded is told by its tokens, wherever the batch goes from here."""
    recorded = routes(6, 1, weight_version=7)
    back = TokenLayout.padded([3, 2], fingerprints=[np.uint64(4), None]).scatter(recorded)
    assert [(sequence.fingerprint, sequence.weight_version) for sequence in back] == [(4, 7), (None, 7)]
    assert RoutedExperts.from_bytes(back[0].to_bytes()).fingerprint == 4


@pytest.mark.parametrize("make", ["padded", "packed", "from_probe"])
def test_two_sequences_that_changed_places_are_refused(make: str) -> None:
    """T24e, T30: equal lengths pass every count; only the fingerprint tells. Without one routes fit any."""
    marks = [fingerprint([number]) for number in range(3)]
    first, second, third = (routes(4, number, fingerprint=mark) for number, mark in enumerate(marks))
    fed = [torch.cat] if make == "from_probe" else []
    layout = getattr(TokenLayout, make)(*fed, [4, 4, 4], fingerprints=marks)
    for batch in ([first, second, third], [first, routes(4, 9), third]):
        layout.gather(batch)
    message = f"sequence 1: .*other tokens.*{marks[1]:#018x}.*{marks[2]:#018x}.*Usual cause: retokenised"
    with pytest.raises(MicroBatchError, match=message):
        layout.gather([first, third, second])


# What doesn't fit


def gathered(lengths: Sequence[int], batch: Any, **about: Any) -> RoutedExperts:
    return TokenLayout.packed(lengths).gather(batch, **about)


def probed(fn: Callable[[list[torch.Tensor]], Any], lengths: Sequence[int] = (3, 3)) -> TokenLayout:
    return TokenLayout.from_probe(fn, lengths)


def laid(rows: object, lengths: Sequence[int] = (2, 1)) -> TokenLayout:
    return TokenLayout(torch.tensor(rows), lengths)


ONE = ([3], [routes(3, 1)])
TWO = ([3, 2], [routes(3, 1), routes(2, 2)])
SLICED = ParallelLayout(tp=2, sequence_parallel=True)
CP2 = ParallelLayout(cp=2)
REFUSED: list[tuple[str, Callable[[], object]]] = [  # what is said, and of what
    # numbers of sequences, tokens and rows: T12, T13
    ("number of sequences.*Expected 2, got 1", lambda: TokenLayout.packed([3, 2]).gather([routes(3, 1)])),
    ("number of sequences.*Expected 2, got 3", lambda: TokenLayout.packed([3, 2]).bad_routes([None] * 3)),
    # T13: each part of a partial rollout with its whole prefix is longer than the sequence
    ("sequence 0.*got 8", lambda: gathered([5], [RoutedExperts.concat([routes(3, 1), routes(5, 2)])])),
    ("sequence 0.*Expected 3.*got 1", lambda: gathered([3], [routes(1, 1)])),
    ("sequence 1.*number of tokens.*got 4", lambda: gathered([3, 2], [routes(3, 1), routes(4, 2)])),
    ("another number of rows", lambda: TokenLayout.padded([3, 2], 4).scatter(routes(7, 1))),
    ("longer than what", lambda: TokenLayout.padded([3, 5], 4)),
    ("empty batch", lambda: gathered([], [])),
    # no routes: T20; without any, nobody knows how many experts there are
    ("sequence 1.*isn't RoutedExperts.*NoneType.*native", lambda: gathered([3, 2], [routes(3, 1), None])),
    ("sequence 0.*isn't RoutedExperts.*Tensor", lambda: gathered([3], [routes(3, 1).ids])),
    (
        "sequence 0.*place of None",
        lambda: gathered([2, 2], [None] * 2, on_bad_route="native", ceiling=1.0),
    ),
    # the first bad one is named, whatever the ceiling, which is for "native"
    ("sequence 0: .*got 4", lambda: gathered([2, 2], [routes(4, 1), None], ceiling=1.0)),
    # layers: T2, T27, the 1-based numbers of Megatron's layer_number too
    ("sequence 0: .*layer 2.*pipeline stage", lambda: gathered(*TWO, layers=[1, 2])),
    (
        "sequence 1: .*layer 4",
        lambda: gathered([3, 2], [routes(3, 1), routes(2, 2, layers=(1, 3))], layers=[1, 4]),
    ),
    *(
        (
            "sequence 1: .*differ from the others",
            lambda about=about: gathered([2] * 2, [routes(2, 1), routes(2, 2, **about)]),
        )
        for about in ({"topk": 3}, {"num_experts": 16}, {"layers": (1, 5)})
    ),
    # fingerprints: T24e
    ("number of fingerprints", lambda: TokenLayout.packed([3, 2], fingerprints=[1])),
    # rows: T24c, two sequences never share a row, nor a token two
    (r"token 1, rows \[1, 3\].*overlaps itself", lambda: laid([0, 1, 2, 1])),
    ("a token that isn't there.*3 tokens", lambda: laid([0, 1, 2, 3])),
    ("a token that isn't there", lambda: laid([0, -2, 1])),
    (r"flat list.*got \[1, 2\]", lambda: laid([[0, 1]])),
    (r"flat list.*got \[\]", lambda: laid(0)),
    ("whole numbers.*float32", lambda: laid([0.0])),
    # lengths and what they are padded to
    ("bad length of a sequence", lambda: TokenLayout.padded([3, -2])),
    ("bad length of a sequence", lambda: laid([0], [-2])),
    ("bad length of a sequence", lambda: probed(torch.cat, [3, -2])),
    ("bad length of a sequence", lambda: TokenLayout.packed([3, 2], padded_lengths=[4, -2])),
    *(
        ("don't add up", lambda rooms=rooms: TokenLayout.packed([3, 2], padded_lengths=rooms))
        for rooms in ([4], [4, 1])
    ),
    ("bad align", lambda: TokenLayout.padded([3, 2], align=0)),
    ("bad align_end", lambda: TokenLayout.packed([3, 2], align_end=0)),
    ("one rule", lambda: TokenLayout.packed([3], align=2, padded_lengths=[4])),
    ("sequence 1.*evenly", lambda: TokenLayout.packed([3, 5], padded_lengths=[4, 6], parallel=CP2)),
    # words and shares
    ("order", lambda: TokenLayout.padded([3], order="time")),
    ("side", lambda: TokenLayout.padded([3], side="top")),
    ("on_bad_route", lambda: gathered(*ONE, on_bad_route="skip")),
    *(
        ("ceiling is a share", lambda bad=bad: gathered(*ONE, ceiling=bad))
        for bad in (-0.1, 50, float("nan"), "many", 10**400)
    ),
    # T44: Megatron slices along the sequence, which batch-major rows are not in order of
    ("sequence-major", lambda: TokenLayout.padded([4, 4], order="batch", parallel=SLICED)),
    (
        "sequence-major",
        lambda: TokenLayout.from_probe(torch.stack, [4, 4], order="batch", parallel=SLICED),
    ),
    # preprocessing that returns no token ids
    *(
        (
            f"something else than token ids.*got {words}",
            lambda fn=fn: probed(lambda tokens: fn(torch.cat(tokens))),
        )
        for words, fn in {
            "{'input_ids.*pick input_ids": lambda ids: {"input_ids": ids},
            "Tensor of torch.bfloat16": torch.Tensor.bfloat16,
        }.items()
    ),
    ("another shape", lambda: probed(lambda tokens: torch.stack(tokens)[None])),
    ("overlaps itself", lambda: probed(lambda tokens: torch.cat([*tokens, tokens[0][:1]]))),
    # that changes the ids: a layout without any token would replay nothing, in silence
    ("none of the token numbers", lambda: probed(lambda tokens: torch.cat(tokens) % 1000)),
    (
        "none of the token numbers",
        lambda: TokenLayout.from_probe(
            lambda tokens: torch.cat(tokens).clamp(max=5) + torch.arange(4), [4], parallel=CP2
        ),
    ),
    # that looks at the ids: the second time it is given the same lengths and other numbers
    *(
        ("other rows the second time", lambda fn=fn: probed(fn))
        for fn in (
            lambda tokens: torch.cat(tokens).sort().values,
            lambda tokens: torch.cat([sequence[sequence % 3 == 0] for sequence in tokens]),
            lambda tokens: torch.cat(tokens)[None, : 4 + int(tokens[0][0]) % 2],
        )
    ),
]


@pytest.mark.parametrize(
    ("kind", "words", "call"),
    [
        *((MicroBatchError, *row) for row in REFUSED),
        (InvalidRoutes, "order", lambda: gathered(*TWO, layers=[4, 1])),
        (InvalidRoutes, "order", lambda: gathered(*TWO, layers=[1, 1])),
        (ReplayError, "context", lambda: TokenLayout.padded([3], context="ring")),
        (ReplayError, "context", lambda: TokenLayout.packed([3], context="ring")),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    kind: type[ReplayError], words: str, call: Callable[[], object]
) -> None:
    with pytest.raises(kind, match=f"(?s){words}"):
        call()


@pytest.mark.parametrize(
    ("sizes", "context", "length", "words"),
    [
        ({"cp": 2}, "zigzag", 6, "context parallel 2, zigzag.*a multiple of 4, got 6"),
        ({"cp": 2}, "contiguous", 5, "context parallel 2, contiguous.*a multiple of 2, got 5"),
        ({"tp": 4, "cp": 2}, "zigzag", 12, "sequence parallel 4.*a multiple of 4, got 6"),
    ],
)
def test_a_length_that_cannot_be_cut_evenly_is_refused(
    sizes: dict[str, Any], context: Any, length: int, words: str
) -> None:
    about = {"context": context, "parallel": ParallelLayout(**sizes, sequence_parallel="tp" in sizes)}
    with pytest.raises(MicroBatchError, match=f"{words}.*Usual cause: padding"):
        TokenLayout.padded([3, 2], length, **about)
    if context == "zigzag":  # contiguous: the whole stream is padded to what can be cut
        with pytest.raises(MicroBatchError, match=words):
            TokenLayout.packed([3], padded_lengths=[length], **about)


# Sequences whose routes can't be used

NOTHING = RoutedExperts.unrecorded(3, layers=LAYERS, topk=TOPK, num_experts=EXPERTS)


def test_bad_routes_says_which_and_why() -> None:
    marks = [fingerprint([number]) for number in range(6)]
    layout = TokenLayout.packed([3] * 6, fingerprints=marks)
    good = routes(3, 0, fingerprint=marks[0])
    batch = [good, None, routes(5, 2), good, routes(2, 4), routes(3, 5, topk=3)]
    bad = layout.bad_routes(batch)
    words = {1: "NoneType", 2: "got 5", 3: "other tokens", 5: "differ from the others"}
    assert {number: error.where for number, error in bad.items()} == {n: f"sequence {n}" for n in words}
    assert all(text in str(bad[number]) for number, text in words.items())
    assert layout.bad_routes([routes(3, number) for number in range(6)]) == {}
    pair = TokenLayout.packed([2, 2])
    first = routes(2, 0)
    for other, layers, wrong in ((LAYERS, (1,), []), (LAYERS, (1, 5), [0, 1]), ((1, 5), (1, 4), [1])):
        assert list(pair.bad_routes([first, routes(2, 1, layers=other)], layers=layers)) == wrong


def test_native_leaves_the_rows_of_a_bad_sequence_to_the_router(caplog: pytest.LogCaptureFixture) -> None:
    """T20, T24b: not recorded, the others in their own rows, and one warning that says so."""
    layout = TokenLayout.padded([3, 2, 4], 4)
    for missing in (None, routes(5, 2), routes(2, 2, topk=3)):
        caplog.clear()
        with caplog.at_level(logging.DEBUG, logger="npu_replay"):
            micro_batch = layout.gather(
                [routes(3, 1), missing, routes(4, 3)], on_bad_route="native", ceiling=0.34
            )
        assert micro_batch.recorded.view(4, 3).T.tolist() == [[True] * 3 + [False], [False] * 4, [True] * 4]
        (record,) = caplog.records
        assert record.levelno == logging.WARNING
        assert re.search("1 of 3 sequences.*equence 1: ", record.getMessage(), re.DOTALL)


@pytest.mark.parametrize(
    ("bad", "of", "how", "words"),
    [
        (1, 4, {"ceiling": 0.25}, ""),
        (2, 4, {"ceiling": 0.25}, r"2 of 4 samples .*at most 25.0%.*got 50.0%.*sequence 0"),
        (1, 100, {"ceiling": 0.01}, ""),
        (2, 100, {"ceiling": 0.01}, r"2 of 100 samples .*at most 1.0%.*got 2.0%.*sequence 0"),
        (29, 100, {"ceiling": 0.29}, ""),  # 29 %, also in floating point
        (30, 100, {"ceiling": 0.29}, "at most 29.0%"),
        (2, 3, {"ceiling": 0.7}, ""),
        # one bad sample stops no job, and an engine whose samples are all bad does, in batches of one too
        (1, 2, {}, ""),
        (1, 1, {}, "1 of 1 samples.*one of several"),
        (1, 2, {"ceiling": 0}, r"^\[npu_replay\] sequence 0: "),
    ],
)
def test_native_stops_above_the_ceiling_and_not_at_it(
    bad: int, of: int, how: dict[str, Any], words: str
) -> None:
    batch = [NOTHING] * bad + [routes(3, number) for number in range(of - bad)]
    if words:
        with pytest.raises(MicroBatchError, match=f"(?s){words}"):
            gathered([3] * of, batch, on_bad_route="native", **how)
    else:
        rows = gathered([3] * of, batch, on_bad_route="native", **how)
        assert int(rows.recorded.sum()) == 3 * (of - bad)


def test_routes_without_a_single_recorded_row_are_bad_ones() -> None:
    """T27, T28: an engine that captured nothing, or an aborted sample, is no native replay in silence."""
    with pytest.raises(MicroBatchError, match="sequence 1: no row of these routes is recorded"):
        gathered([3, 3], [routes(3, 1), NOTHING])
    # the caller says that it was counted over the rollout
    assert gathered([3], [NOTHING], on_bad_route="native", ceiling=1.0) == NOTHING
    short = gathered([4], [routes(2, 1)], layers=[1], on_bad_route="native", ceiling=1.0)
    assert (short.recorded.tolist(), short.layers, short.num_experts) == ([False] * 4, (1,), EXPERTS)
    assert gathered([1], [routes(1, 1).take([-1])]).recorded.tolist() == [False]


# from_probe


@examples(300)
@given(
    batch=batches(),
    pad=st.sampled_from([0, -100, 1, 151_643, 2**31 - 1]),
    dtype=st.sampled_from([torch.int64, torch.int32]),
    wrapped=st.booleans(),
)
def test_a_probe_finds_the_same_rows(batch: Batch, pad: int, dtype: torch.dtype, wrapped: bool) -> None:
    """T16, T17, T20, T27, T44: whatever the id of the padding; the caller cuts over context parallel ranks.
    [rows], [1, rows], or [batch, sequence] before the sequence-parallel slice."""
    for rank in batch.ranks():
        whole = [cell for cells in batch.grid(rank.cp_rank) for cell in cells]

        def fn(sequences: list[torch.Tensor], whole: list[Cell] = whole) -> torch.Tensor:
            flat = torch.cat(sequences).tolist()
            ids = torch.tensor([pad if token is None else flat[token] for token in whole], dtype=dtype)
            return (
                ids.reshape(len(batch.lengths), -1)
                if batch.is_padded and whole
                else ids[None]
                if wrapped
                else ids
            )

        order = batch.about.get("order", "sequence")
        layout = TokenLayout.from_probe(fn, batch.lengths, order=order, parallel=rank)
        assert torch.equal(layout.rows, batch.layout(rank).rows)


def test_a_probe_sees_sequences_in_another_order_and_tokens_that_were_dropped() -> None:
    """T12: the response was cut, the routes weren't; the probe tells the rows that are left."""
    layout = probed(
        lambda tokens: torch.cat([sequence[:3] for sequence in sorted(tokens, key=len)[::-1]]), [2, 5, 1]
    )
    assert layout.rows.tolist() == [2, 3, 4, 0, 1, 7]
    micro_batch = layout.gather([routes(2, 0), routes(5, 1), routes(1, 2)])
    recorded = [sequence.recorded.tolist() for sequence in layout.scatter(micro_batch)]
    assert recorded == [[True] * 2, [True] * 3 + [False] * 2, [True]]


@pytest.mark.parametrize("kind", [torch.Tensor.tolist, lambda ids: ids.int().numpy()])
def test_a_probe_hands_in_one_int64_tensor_a_sequence_twice(kind: Callable[[torch.Tensor], Any]) -> None:
    """And takes lists and arrays."""
    seen: list[list[torch.Tensor]] = []

    def fn(sequences: list[torch.Tensor]) -> Any:
        seen.append([sequence.clone() for sequence in sequences])
        ids = torch.cat(sequences)
        for sequence in sequences:
            sequence.zero_()  # preprocessing may write into what it is given
        return kind(ids)

    assert probed(fn, [3, 0, 2]).rows.tolist() == [0, 1, 2, 3, 4]
    first, second = map(torch.cat, seen)
    assert first.dtype == torch.int64
    assert not (first == second).any()
    assert max(first.max(), second.max()) < 2**31, "preprocessing may make them int32"
    assert min(first.min(), second.min()) > 1_000_000, "no vocabulary's ids, a padding id among them"


def test_a_probe_with_the_real_tokens_finds_ids_that_are_treated_apart() -> None:
    """A mask of ids != pad drops that id inside the text too; numbers in its place never show it."""

    def masked(sequences: list[torch.Tensor]) -> torch.Tensor:
        grid = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=2)
        kept = grid[grid != 2]
        return torch.nn.functional.pad(kept, (0, -len(kept) % 8), value=2)

    tokens = [[5, 2, 7, 8, 2], [9, 4]]
    assert probed(masked, [5, 2]).rows.tolist() == [0, 1, 2, 3, 4, 5, 6, -1]
    for given_tokens, words in ((tokens, "the real token ids into other rows"), (tokens[:1], "differ")):
        with pytest.raises(MicroBatchError, match=words):
            TokenLayout.from_probe(masked, [5, 2], tokens=given_tokens)
    assert TokenLayout.from_probe(torch.cat, [5, 2], tokens=tokens).rows.tolist() == list(range(7))


def test_a_layout_keeps_its_own_rows_and_takes_any_whole_numbers() -> None:
    rows = torch.tensor([0, 1, 2])
    layouts = [TokenLayout(rows, lengths) for lengths in (np.array([2, 1]), torch.tensor([2, 1]))]
    rows[0] = 2
    assert [(layout.lengths, layout.rows.tolist()) for layout in layouts] == [((2, 1), [0, 1, 2])] * 2
    rank = ParallelLayout(tp=2, tp_rank=1, sequence_parallel=True)
    layout = TokenLayout.padded([3, 4], parallel=rank)
    assert layout.fed.tolist() == [0, 1, 2, -1, 3, 4, 5, 6], "the model of each rank is called with all of it"
