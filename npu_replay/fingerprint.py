"""The fingerprint of a sequence: which tokens a set of routes belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch


def fingerprint(token_ids: torch.Tensor | np.ndarray | Sequence[int]) -> int:
    """Return the 64-bit fingerprint of one sequence of token ids, shape [tokens].

    BLAKE2b with an 8-byte digest over the ids as little-endian int64, read as a little-endian unsigned
    integer. The hash is part of the file format: it won't change.
    """
    if isinstance(token_ids, torch.Tensor):
        token_ids = token_ids.detach().cpu().numpy()
    ids = np.ascontiguousarray(np.asarray(token_ids).reshape(-1), dtype="<i8")
    return int.from_bytes(hashlib.blake2b(ids.tobytes(), digest_size=8).digest(), "little")
