"""Says where tokens over an expert's capacity are dropped by live scores, which a replay doesn't hold."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence

from npu_replay.routers import Router

logger = logging.getLogger(__name__)


def warn(routers: Sequence[Router]) -> None:
    """Warn, once in the process, if these routers choose anew which tokens their experts drop."""
    if any(router.drops_by_scores for router in routers):
        _say()


# Cached: the process warns once.
@functools.cache
def _say() -> None:
    logger.warning(
        "[npu_replay] an expert over its capacity drops tokens by their live probabilities, which no replay "
        "holds: after an optimizer step other rows lose an expert than in the pass that chose the routes. "
        "metrics()['capacity_dropped'] is the share of chosen experts that lost their token. "
        "moe_token_drop_policy='position' drops the same ones, and without a capacity none is dropped"
    )
