"""What is found wrong in an array of expert ids, against slow loops that can't be mistaken."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from choice import examples
from npu_replay.routes import checks
from npu_replay.routes.checks import Array

DTYPES = ["u1", "u2", "i2", "i4", "i8", ">i4"]
LAYOUTS: dict[str, Callable[[Array], Array]] = {  # the same ids, differently in memory
    "plain": lambda ids: ids,
    "read-only": lambda ids: np.broadcast_to(ids, ids.shape),
    "by column": np.asfortranarray,
    "every second column": lambda ids: np.repeat(ids, 2, axis=1)[:, ::2],
    "last row first": lambda ids: np.ascontiguousarray(ids[::-1])[::-1],
    "of a wider array": lambda ids: np.pad(ids, ((1, 1), (2, 1), (0, 3)))[1:-1, 2:-1, : ids.shape[2]],
}
BLOCKS = [1, 7, 64, 1 << 17]


@st.composite
def arrays(draw: st.DrawFn) -> Array:
    """Few experts, so that ids meet, in any dtype and any way to lie in memory; [tokens, layers, topk]."""
    tokens = draw(st.integers(0, 40))
    layers = draw(st.integers(1, 4))
    width = draw(st.integers(1, 16))
    experts = draw(st.sampled_from([2, width + 1, 2 * width, 200]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    ids = rng.integers(0, experts, (tokens, layers, width))
    if draw(st.booleans()):
        ids = np.argsort(rng.random((tokens, layers, max(width, experts))), axis=2)[..., :width]
    for _ in range(draw(st.integers(0, 3)) if tokens else 0):
        ids[rng.integers(tokens)] = 0
    for _ in range(draw(st.integers(0, 3)) if tokens else 0):
        ids[rng.integers(tokens)] = ids[rng.integers(tokens)]
    if draw(st.integers(0, 3)) == 0 and tokens:
        ids[:, rng.integers(layers)] = ids[0, 0]
    layout = LAYOUTS[draw(st.sampled_from([*LAYOUTS]))]
    return layout(ids.astype(draw(st.sampled_from(DTYPES))))


def slow_twice(ids: Array, recorded: Array) -> Iterator[tuple[int, int]]:
    for row in range(ids.shape[0]):
        for column in range(ids.shape[1]):
            chosen = ids[row, column].tolist()
            if recorded[row] and len(set(chosen)) < len(chosen):
                yield row, column


def slow_repeated(ids: Array, tokens: list[int]) -> Iterator[int]:
    """The nearest row before that is the same: is it another token's?"""
    last: dict[bytes, int] = {}
    for row, token in enumerate(tokens):
        key = ids[row].tobytes()
        if last.get(key, token) != token:
            yield row
        last[key] = token


@examples(150)
@given(ids=arrays(), seed=st.integers(0, 2**32), hidden=st.sampled_from([0.0, 0.3, 1.0]))
def test_experts_named_twice_are_found_and_only_in_recorded_rows_t1(
    ids: Array, seed: int, hidden: float
) -> None:
    recorded = np.random.default_rng(seed).random(len(ids)) >= hidden
    before = ids.copy()
    for size in BLOCKS:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checks, "_BLOCK", size)
            pairs = checks.named_twice(ids, recorded)
        assert pairs.dtype == np.int64
        assert pairs.shape[1:] == (2,)
        assert [tuple(at) for at in pairs.tolist()] == list(slow_twice(ids, recorded))
    assert np.array_equal(ids, before)


@examples(150)
@given(ids=arrays())
def test_constant_columns_and_blank_rows_are_found_t32_t42(ids: Array) -> None:
    assert checks.constant_columns(ids).tolist() == [
        column
        for column in range(ids.shape[1])
        if len(ids) and all((ids[row, column] == ids[0, column]).all() for row in range(len(ids)))
    ]
    blank = [row for row in range(len(ids)) if not any(ids[row].ravel().tolist())]
    assert checks.blank_rows(ids).tolist() == blank


@examples(150)
@given(ids=arrays(), words=st.integers(1, 9), seed=st.integers(0, 2**32))
def test_rows_of_another_token_are_found_t31(ids: Array, words: int, seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, words, len(ids))
    assert checks.repeated_rows(ids, tokens).tolist() == list(slow_repeated(ids, tokens.tolist()))


@examples(150)
@given(ids=arrays(), seed=st.integers(0, 2**32), hidden=st.sampled_from([0.0, 0.3]))
def test_copies_count_if_they_are_many_and_of_several_tokens_t31(
    ids: Array, seed: int, hidden: float
) -> None:
    drawn = np.random.default_rng(seed)
    tokens = drawn.integers(0, 9, len(ids))
    recorded = drawn.random(len(ids)) >= hidden
    tokens[~recorded] = -1
    rows = [*slow_repeated(ids, tokens.tolist())]
    many = len(rows) * 20 > recorded.sum() and len({*tokens[rows].tolist()}) >= 4
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks, "tells_apart", lambda *model: True)
        copies = checks.copied_rows(ids, recorded, 2**15, tokens)
    assert copies.tolist() == (rows if many else [])


def test_rows_that_differ_in_one_id_are_not_taken_for_each_other_t31() -> None:
    for place in range(0, 27 * 6, 7):
        ids = np.zeros((201, 27 * 6), np.uint8)
        ids[:200, place] = np.arange(200)
        ids[200] = ids[20]
        assert checks.repeated_rows(ids.reshape(201, 27, 6), np.arange(201)).tolist() == [200]


def test_rows_that_share_a_number_are_compared_id_by_id_t31() -> None:
    """So many rows that some 18 pairs share the 32 bits by which they are looked for."""
    rows = np.random.default_rng(0).integers(0, 256, (400_000, 1, 8), np.uint8)
    assert len(np.unique(rows.view(np.uint64))) == len(rows)
    assert checks.repeated_rows(rows, np.arange(len(rows))).tolist() == []
