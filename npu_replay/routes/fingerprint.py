"""The fingerprint of a sequence: which tokens a set of routes belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from npu_replay.errors import ReplayError, shown
from npu_replay.routes.token_ids import as_token_ids


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
