"""The token ids of a sequence, and their fingerprint: which tokens a set of routes belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from npu_replay.errors import ReplayError, shown
from npu_replay.routes.checks import Array


def fingerprint(token_ids: torch.Tensor | np.ndarray | Sequence[int]) -> int:
    """Return the 64-bit fingerprint of one sequence of token ids, shape [tokens].

    BLAKE2b with an 8-byte digest over the ids as little-endian int64, read as a little-endian unsigned
    integer. The hash is part of the file format: it won't change.

    >>> npu_replay.fingerprint([151644, 872, 198])
    1855700983335460597

    Raises:
        ReplayError: no integers that fit into int64, or another shape.
    """
    ids = as_token_ids(token_ids)
    if ids is None:
        raise ReplayError(
            "these aren't the token ids of one sequence",
            where="fingerprint",
            expected="integers, [tokens]",
            got=shown(token_ids),
            cause="a batch (take its samples one by one), or logits, text or embeddings in its place",
        )
    ids = np.ascontiguousarray(ids, dtype="<i8")
    return int.from_bytes(hashlib.blake2b(ids.data, digest_size=8).digest(), "little")


def as_token_ids(value: Any) -> Array | None:
    """Somebody's token ids as [tokens] int64; None where they aren't one row of integers that fit.

    The caller says whose they are in an error of his own.

    >>> as_token_ids([3, 1])
    array([3, 1])
    >>> as_token_ids([[3, 1]]) is None
    True
    """
    try:
        found = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
        if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            return None
        # The caller's own array may change later; what was made of a list is ours already.
        ids = found.astype(np.int64, copy=not isinstance(value, (list, tuple)))
    except (ValueError, TypeError, OverflowError, RuntimeError):
        return None  # ragged, of things that aren't numbers, or a tensor that numpy can't hold
    wrapped = found.size and int(found.max()) != int(ids.max())
    return None if wrapped else ids
