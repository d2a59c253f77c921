"""Token ids in whatever they come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from npu_replay.routes.fingerprint import as_token_ids


@pytest.mark.parametrize(
    "value", [[3, 4], (3, 4), np.array([3, 4], "u2"), torch.tensor([3, 4]), np.array([3, 4], ">i4")], ids=repr
)
def test_one_row_of_integers_is_taken(value: Any) -> None:
    ids = as_token_ids(value)
    assert ids is not None
    assert ids.dtype == np.int64
    assert ids.tolist() == [3, 4]


def test_no_tokens_are_token_ids_too() -> None:
    ids = as_token_ids([])
    assert ids is not None
    assert (ids.dtype, ids.shape) == (np.int64, (0,))


@pytest.mark.parametrize(
    "value",
    [
        7,
        None,
        "34",
        ["3"],
        [3.0],
        [True],
        [[3, 4]],
        [[3], [4, 5]],
        [2**70],
        np.array([2**63 + 5], np.uint64),
        torch.eye(2).to_sparse(),
    ],
    ids=repr,
)
def test_what_isnt_is_told(value: Any) -> None:
    """2**63 + 5 would become a negative number, and be one token in silence."""
    assert as_token_ids(value) is None
