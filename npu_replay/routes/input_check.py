"""Holds the calls of a replay against the tokens and images that their routes belong to."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from npu_replay.errors import EXTRA, LEFT_OUT, OTHER_ORDER, RECUT, MicroBatchError, likeliest, micro_batch
from npu_replay.routes.inputs import Called, Inputs, find_other_order, find_other_padding
from npu_replay.routes.routed_experts import RoutedExperts

logger = logging.getLogger(__name__)


class InputCheck:
    """Checks the calls of a replay against the inputs of their routes.

    `compared` counts the micro-batches whose routes all have a fingerprint that was compared with the call's.
    """

    def __init__(self, routes: Sequence[RoutedExperts]) -> None:
        self._placements = [of_micro_batch.placement for of_micro_batch in routes]
        self.known = [_inputs_of(of_micro_batch) for of_micro_batch in routes]
        self.compared = 0

    def tells_tokens(self, number: int) -> bool:
        """Return whether the tokens that a micro-batch is called with are known, by its layout or routes."""
        inputs = self.known[number]
        return inputs is not None and inputs.tells_tokens

    def knows_tokens(self, number: int) -> bool:
        """Return whether it is known which tokens the routes of a micro-batch belong to."""
        # A layout's fingerprints tell the tokens of the call, not those of routes without one.
        return self.tells_tokens(number) and not self._placements[number].unnamed

    def check(self, number: int, call: Called, row_order: str | None = None) -> None:
        """Refuse a micro-batch that was called with other inputs than those of its routes.

        `row_order` is that of the model's routers, if it is known.
        """
        inputs = self.known[number]
        called = call.on_host()
        fed = None if inputs is None else inputs.fed
        shape = called.tokens.shape
        other = find_other_order(row_order, self._placements[number].row_order, fed, shape)
        other = other or find_other_padding(fed, called.real)
        if other is not None:
            raise other.error(MicroBatchError, micro_batch(number))
        differing = inputs.differing(called) if inputs else None
        self.compared += differing is not None and not self._placements[number].unnamed
        if differing:
            others = [
                n
                for n, inputs_there in enumerate(self.known)
                if inputs_there and inputs_there.differing(called) == []
            ]
            raise MicroBatchError(
                "the model was called with other tokens than those that the routes belong to".replace(
                    "tokens", " and ".join(differing)
                ),
                where=micro_batch(number),
                expected="the tokens and images of the record, or of the fingerprints, in their places",
                got=f"those of the routes of {micro_batch(others[0])}" if others else "others",
                cause=likeliest(
                    OTHER_ORDER,
                    RECUT,
                    "padding on another side, to another length or with other ids",
                    LEFT_OUT,
                    f"{EXTRA} (by a policy whose adapter is off, say)",
                    "a micro-batch that was run again after its backward had raised: it needs a new block",
                    "fingerprints of more tokens than the model is fed",
                )
                + "\nrecord(inputs=False), or a layout without fingerprints, checks none",
            )

    def warn(self, chunks: Sequence[nn.Module], *, judged: bool) -> None:
        """Warn if no call was held against its routes' tokens, except in a later pipeline stage.

        `judged` says whether the routes were compared with the routers' own choice.
        """
        known = any(self.knows_tokens(number) for number in range(len(self.known)))
        if self.compared or (not known and (judged or _warned)):
            return
        if not all(getattr(module, "pre_process", True) for chunk in chunks for module in chunk.modules()):
            return
        if known:
            logger.warning(
                "[npu_replay] no micro-batch was held against the tokens that its routes belong to: the "
                "module of this block isn't called with all token ids. Open the block on the one that is"
            )
        else:
            _warned.append(True)
            logger.warning(
                "[npu_replay] nothing holds these routes against the tokens of the model's calls: routes of "
                "another micro-batch would be replayed. They don't say which tokens they belong to "
                "(fingerprint= of each sequence's routes, fingerprints= of the layout, or a record of calls "
                "with token ids), and weren't compared with the routers' own choice either (fewer than 64 "
                "rows, or min_overlap=0)"
            )


def _inputs_of(routes: RoutedExperts) -> Inputs | None:
    """Return the tokens that routes belong to, by their layout or record, else by their own fingerprint."""
    if routes.placement.inputs is None and routes.fingerprint is not None:
        return Inputs(None, (len(routes),), (routes.fingerprint,))
    return routes.placement.inputs


_warned: list[bool] = []
"""Whether the process has warned that nothing could be compared: it does so once."""
