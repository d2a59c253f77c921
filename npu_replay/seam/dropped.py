"""Choose the tokens that keep their place at an expert that is over its capacity.

A recording says which tokens its experts dropped. Other routes don't: there the live scores decide, and one
WARNING says so.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)


# Cached: the process warns once.
@functools.cache
def warn() -> None:
    """Warn, once in the process, that a replay chooses anew which tokens an expert drops."""
    logger.warning(
        "[npu_replay] an expert over its capacity drops tokens by their live probabilities, and these routes "
        "don't say which it dropped before: after an optimizer step other rows lose an expert than in the "
        "pass that chose the routes. metrics()['capacity_dropped'] is the share of chosen experts that lost "
        "their token. A replay of recording.routes, as record() made them, drops the same tokens; so does "
        "moe_token_drop_policy='position', and without a capacity none is dropped"
    )


def kept_places(
    scores: torch.Tensor,
    own: torch.Tensor,
    ids: torch.Tensor,
    loses: torch.Tensor | None,
    native: Callable[..., Any],
) -> torch.Tensor:
    """Return the tokens that each expert keeps, [capacity, experts].

    A given expert may have a probability of exactly zero, and its token must not lose its place to one that
    was not routed there. So the choice is made anew for experts that lost a token which was routed to them.

    Args:
        scores: [rows, experts], 0 where a token is not routed to the expert.
        own: the choice of the router, [capacity, experts], which holds for all other experts.
        ids: int64 [rows, topk].
        loses: the ids whose token was dropped, bool [rows, topk], which come behind all others; None if it
            isn't known.
        native: the top-k along the rows.
    """
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, ids, True)
    lifted = scores.masked_fill(chosen & (scores == 0), least_positive(scores.dtype))
    if loses is not None:
        gone = torch.zeros_like(chosen).scatter(1, ids, loses)
        places: torch.Tensor = native(lifted.masked_fill(gone, -1))[1]
        return places
    again = native(lifted)[1]
    lost = chosen.gather(0, own).sum(dim=0) < chosen.gather(0, again).sum(dim=0)
    return torch.where(lost, again, own)


def least_positive(dtype: torch.dtype) -> float:
    """Return the least positive number of a dtype that no device flushes to zero."""
    return max(2.0**-24 if dtype == torch.float16 else 0.0, torch.finfo(torch.float32).tiny)
