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
    for tokens in (*arrays, *tensors, tuple(small), read_only, np.array(small[::-1])[::-1]):
        assert fingerprint(tokens) == fingerprint(small)
        assert as_token_ids(tokens).dtype == np.int64


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


LENGTH = "the routes have another number of tokens than the sequence"


@pytest.mark.parametrize(
    ("rows", "theirs", "tokens", "mark", "problem"),
    [
        (3, 7, 3, 7, None),
        (2, 7, 3, 7, None),
        (0, 7, 0, 7, None),
        (3, None, 3, 7, None),
        (3, 7, 3, None, None),
        (4, 7, 3, 7, LENGTH),
        (1, 7, 3, 7, LENGTH),
        (1, None, 0, None, LENGTH),
        (3, 8 << 32, 3, 0, "the routes belong to other tokens"),  # 0 is a fingerprint, too
        (3, 8, 3, 0, "the routes are of these tokens, and have another sample_key"),
    ],
)
def test_routes_belong_to_tokens_of_their_number_and_their_fingerprint_if_both_are_known(
    rows: int, theirs: int | None, tokens: int, mark: int | None, problem: str | None
) -> None:
    """The last token has no row in an engine's array: T27. And T12, T13, T24e."""
    finding = find_other_tokens(rows, theirs, tokens, mark)
    assert (finding and finding.problem) == problem
