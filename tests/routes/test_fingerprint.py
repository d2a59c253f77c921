"""The fingerprint tells sequences apart and never changes: it is part of the file format."""

import numpy as np
import pytest
import torch

from npu_replay import fingerprint
from npu_replay.errors import ReplayError

TOKENS = [1, 2, 3, 151_643, 0]


def test_the_hash_is_pinned() -> None:
    """A changed hash would refuse every file that was written before."""
    assert fingerprint(TOKENS) == 0xF70179F6971B3F98
    assert fingerprint([]) == 0xB4B2797457A0A6E4


@pytest.mark.parametrize("dtype", ["i2", "u2", "i4", "i8", ">i8", "u4"])
def test_the_same_tokens_give_the_same_number_whatever_holds_them(dtype: str) -> None:
    small = [1, 2, 3, 0]
    array = np.array(small, dtype=dtype)
    assert fingerprint(array) == fingerprint(small)
    assert fingerprint(np.array(small * 2, dtype=dtype)[::-1][::-1]) == fingerprint(small * 2)
    array.flags.writeable = False
    assert fingerprint(array) == fingerprint(small)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_tensor_gives_the_same_number_as_a_list(dtype: torch.dtype) -> None:
    assert fingerprint(torch.tensor(TOKENS, dtype=dtype)) == fingerprint(TOKENS)
    assert fingerprint(tuple(TOKENS)) == fingerprint(TOKENS)


@pytest.mark.parametrize(
    "other",
    [TOKENS[:-1], [*TOKENS, 0], TOKENS[::-1], [1, 2, 3, 151_644, 0], []],
    ids=["truncated", "padded", "shuffled", "retokenised", "nothing"],
)
def test_another_sequence_gives_another_number_t12_t13(other: list[int]) -> None:
    assert fingerprint(other) != fingerprint(TOKENS)


@pytest.mark.parametrize(
    "other",
    [[1.7], [[1, 2], [3, 4]], [2**63], torch.tensor([1, 2]).bfloat16(), "abc", None, 7],
    ids=["a fraction", "a batch", "beyond int64", "bfloat16", "text", "nothing", "one number"],
)
def test_what_is_no_sequence_of_token_ids_is_refused(other: object) -> None:
    """A batch would pass for one sequence, a fraction for the token below it."""
    with pytest.raises(ReplayError, match="these aren't the token ids of one sequence"):
        fingerprint(other)  # type: ignore[arg-type]


def test_it_fits_into_64_bits() -> None:
    assert all(0 <= fingerprint([token]) < 2**64 for token in range(100))
