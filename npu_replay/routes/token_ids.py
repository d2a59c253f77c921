"""Token ids of somebody else's: a list, an array or a tensor, as one array."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from npu_replay.routes.checks import Array


def as_token_ids(value: Any) -> Array | None:
    """`value` as [tokens] int64; None where it isn't one row of integers that fit.

    The caller says whose they are in an error of his own.
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
