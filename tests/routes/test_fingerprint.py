"""The fingerprint tells sequences apart and never changes: it is part of the file format."""

from typing import Any

import numpy as np
import pytest
import torch

from npu_replay import fingerprint
from npu_replay.errors import ReplayError
from npu_replay.routes.fingerprint import as_token_ids, find_other_tokens, with_key

TOKENS = [1, 2, 3, 151_643, 0]


def test_the_hash_is_pinned() -> None:
    """A changed hash would refuse every file that was written before."""
    assert fingerprint(TOKENS) == 0xF70179F6971B3F98
    assert fingerprint([]) == 0xB4B2797457A0A6E4


def test_the_same_tokens_give_the_same_number_whatever_holds_them() -> None:
    small = [1, 2, 3, 0]
    arrays = [np.array(small, dtype) for dtype in ("i2", "u2", "i4", "i8", ">i8", "u4")]
    tensors = [torch.tensor(small, dtype=dtype) for dtype in (torch.int32, torch.int64)]
    read_only = np.array(small)
    read_only.flags.writeable = False
    for held in (*arrays, *tensors, tuple(small), read_only, np.array(small[::-1])[::-1]):
        assert fingerprint(held) == fingerprint(small)
        ids = as_token_ids(held)
        assert ids is not None
        assert ids.dtype == np.int64


def test_a_key_tells_samples_of_the_same_tokens_apart_and_keeps_the_half_of_the_tokens() -> None:
    keys = ["", "a", "b", 7, -7, "ä\ud800", 2**63, np.int64(8), "7 "]
    marks = [fingerprint(TOKENS, sample_key=key) for key in keys]
    assert len({*marks, fingerprint(TOKENS)}) == len(keys) + 1
    assert {mark >> 32 for mark in marks} == {fingerprint(TOKENS) >> 32}
    assert fingerprint(TOKENS, sample_key="7") == fingerprint(TOKENS, sample_key=7) == 0xF70179F682A36C76
    assert with_key(marks[1], "b") == marks[2]  # the newest key counts


# Token ids in whatever they come


@pytest.mark.parametrize(
    "value",
    [
        *(7, None, "34", ["3"], [3.0], [True], [[3, 4]], [[3], [4, 5]], [2**63], [2**70]),
        *(torch.tensor([1, 2]).bfloat16(), np.array([2**63 + 5], np.uint64), torch.eye(2).to_sparse()),
    ],
    ids=repr,
)
def test_what_is_no_sequence_of_token_ids_is_refused(value: Any) -> None:
    """A batch would pass for one sequence, a fraction for the token below it, 2**63 + 5 for another."""
    assert as_token_ids(value) is None
    with pytest.raises(ReplayError, match="these aren't the token ids of one sequence"):
        fingerprint(value)


def test_routes_belong_to_tokens_of_their_number_and_their_fingerprint_if_both_are_known() -> None:
    """The last token has no row in an engine's array: T27. And T12, T13, T24e."""
    for rows, theirs, tokens, mark in (
        (3, 7, 3, 7),
        (2, 7, 3, 7),
        (3, None, 3, 7),
        (3, 7, 3, None),
        (0, 7, 0, 7),
    ):
        assert find_other_tokens(rows, theirs, tokens, mark) is None
    for rows, theirs, tokens, mark in ((4, 7, 3, 7), (1, 7, 3, 7), (1, None, 0, None)):
        found = find_other_tokens(rows, theirs, tokens, mark)
        assert found is not None
        assert (found.problem, found.got) == (
            "the routes have another number of tokens than the sequence",
            rows,
        )
    for theirs, mark, words in (
        (8 << 32, 0, "belong to other tokens"),  # 0 is a fingerprint, too
        (8, 0, "are of these tokens, and have another sample_key"),
    ):
        other = find_other_tokens(3, theirs, 3, mark)
        assert other is not None
        assert words in str(other.error(ReplayError, "sequence 1"))
