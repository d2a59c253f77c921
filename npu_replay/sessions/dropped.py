"""Says that tokens over an expert's capacity are dropped by live scores, since no record says which were."""

from __future__ import annotations

import functools
import logging

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
