"""A replay's calls of the model, held against the tokens and images that their routes belong to."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from npu_replay.errors import MicroBatchError, micro_batch
from npu_replay.routes.inputs import Called, Inputs, copied
from npu_replay.routes.routed_experts import RoutedExperts

logger = logging.getLogger(__name__)


class InputCheck:
    """Compares each micro-batch's inputs with those of its routes.

    Attributes:
        compared: micro-batches whose tokens were compared.
    """

    def __init__(self, routes: Sequence[RoutedExperts]) -> None:
        self._inputs = [Inputs.of(one) for one in routes]
        self.compared = 0

    def wanted(
        self, number: int, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Called | None:
        """Return what is compared of a micro-batch's call, without waiting for the device."""
        return None if self._inputs[number] is None else copied(args, kwargs, module)

    def check(self, number: int, given: Called) -> None:
        """Refuse a micro-batch that was called with other inputs than those of its routes."""
        inputs, called = self._inputs[number], given.on_host()
        found = None if inputs is None else inputs.differing(called)
        self.compared += found is not None
        if found:
            problem = "the model was called with other tokens than those that the routes belong to"
            others = [n for n, one in enumerate(self._inputs) if one and one.differing(called) == []]
            raise MicroBatchError(
                problem.replace("tokens", " and ".join(found)),
                where=micro_batch(number),
                expected="the tokens and images of the record, or of the fingerprints, in their places",
                got=f"those of the routes of {micro_batch(others[0])}" if others else "others",
                cause="an evaluation or a reference pass inside the block, which belongs outside; "
                "micro-batches in another order than their routes (a shuffle, dynamic batches); padding on "
                "another side, to another length or with other ids; or fingerprints of more tokens than the "
                "model is fed. record(inputs=False), or a layout without fingerprints, checks none",
            )

    def warn(self, chunks: Sequence[nn.Module]) -> None:
        """Warn where routes know their tokens and no call told its own, but not in a later pipeline stage."""
        if self.compared or not any(self._inputs):
            return
        if all(getattr(one, "pre_process", True) for chunk in chunks for one in chunk.modules()):
            logger.warning(
                "[npu_replay] no micro-batch was held against the tokens that its routes belong to: the "
                "module of this block isn't called with all token ids. Open the block on the one that is"
            )
