"""Checks what an engine returned in verl's agent loops, where the tokens of the turn are known.

The trainer checks again what it can tell without tokens.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from npu_replay import environment
from npu_replay.compat import probe
from npu_replay.compat.sglang import decode as sglang
from npu_replay.compat.vllm import decode as vllm
from npu_replay.errors import InvalidRoutes, ReplayError
from npu_replay.rollout.admit import admit
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.release_rules import Source
from npu_replay.routes import checks
from npu_replay.routes.checks import Array
from npu_replay.sessions.micro_batch import is_due

logger = logging.getLogger(__name__)
_warned: Counter[str] = Counter()

PROOF = 64
"""The number of turns that have to pass before a failing one is taken for a single case: what is wrong with
the engine or its settings shows in all turns, from the first on.
"""


class RolloutChecks:
    """Checks the turns of one worker of agent loops; `source` is the engine, for messages."""

    def __init__(self, model: RoutedModel, source: Source) -> None:
        self.model = model
        self._source = source
        self._passed = 0

    @classmethod
    def of(cls, worker: Any, engine: str) -> RolloutChecks | None:
        """Return the checks of a worker; None where the model's config is absent or unreadable."""
        config = getattr(getattr(worker, "model_config", None), "hf_config", None)
        why = "the worker of the agent loops has no config of the model"
        try:
            if config is not None:
                versions = {
                    product.name: product.version for product in probe.products() if product.installed
                }
                version = versions.get(engine) or ""
                known = {"vllm": vllm.source, "sglang": sglang.source}.get(engine)
                source = Source(engine=engine, version=version) if known is None else known(version)
                return cls(RoutedModel.of(config), replace(source, sample="a turn of an agent loop"))
        except ReplayError as error:
            why = str(error)
        _say_unchecked(why)
        return None

    def admitted(self, rows: Array, tokens: Array, *, ended: bool) -> Array | None:
        """Return the rows of one turn, zeros where they are another token's; None if they can't be used.

        Args:
            rows: [n, columns, topk], as the engine gave them; row i is token i.
            tokens: [tokens], of prompt and output; the last has no row, nor have others of an aborted turn.
            ended: whether the engine ended the turn by itself.

        Raises:
            InvalidRoutes: what is wrong, unless many turns have passed before, or NPU_REPLAY_STRICT=off.
        """
        if not ended:
            tokens = tokens[: len(rows) + 1]
        lenient = self._passed >= PROOF or not environment.strict()
        # The trainer counts rows that were never written: of a cached prefix, or of a turn that was cut.
        columns = self.model.routed_columns(rows.shape[1])
        routed = rows[:, [] if columns is None else columns]
        written = bool(routed.size) and not checks.rows_without_route(routed, self.model.num_experts)
        try:
            routes = admit(
                rows,
                model=self.model,
                tokens=tokens,
                source=self._source,
                ended=ended,
                missing="error" if written and not lenient else "native",
            )
        except InvalidRoutes as error:
            if not lenient:
                raise
            warn_seldom("%d turns so far go without their routes: %s", error)
            return None
        self._passed += 1
        known = routes.recorded.numpy()[: len(rows)]
        return rows if known.all() else np.where(known[:, None, None], rows, 0)


@functools.cache
def _say_unchecked(why: str) -> None:
    logger.warning(
        "[npu_replay] rollout: rows of another token can't be told here, since the model isn't known; all "
        "else is checked in the trainer. %s",
        why,
    )


def warn_seldom(words: str, *values: Any) -> None:
    """Log a warning at the 1st, 2nd, 4th, 8th time and so on; its first value is how often it happened."""
    _warned[words] += 1
    if is_due(_warned[words]):
        logger.warning("[npu_replay] rollout: %s", words % (_warned[words], *values))
