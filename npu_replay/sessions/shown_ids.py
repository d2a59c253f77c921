"""Whether each output shows each of its ids: asked in every micro-batch and in every recompute.

It is one operation a call, and what is found stays on the device until it is read: a CPU's when the forward
has ended, an accelerator's when the next one begins. By then it is there, and the host doesn't wait.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from npu_replay.routers import Router


class Asked(NamedTuple):
    """A call of a router.

    Attributes:
        again: it was a recompute.
        about: what was asked: whether its output shows its "ids", whether its "weights" were made from a
            mask's number, or whether a "fused" router chose what its forward chose.
    """

    router: Router
    number: int
    again: bool
    about: str = "ids"


class ShownIds:
    """Looks at outputs, and tells of the first that doesn't show its ids."""

    def __init__(self) -> None:
        self._looked: list[tuple[Router, int, bool, str, torch.Tensor]] = []
        """What was asked (see Asked), and bool [rows, topk]: for which of the ids is it right?"""

    def look(
        self, router: Router, number: int, shown: torch.Tensor, ids: torch.Tensor, *, again: bool = False
    ) -> None:
        """Look at an output.

        Args:
            shown: what `Router.shows` gave: bool [rows, experts], or ids [rows, topk].
            ids: int64 [rows, topk].
        """
        if shown.dtype == torch.bool and shown.shape == (ids.shape[0], router.num_experts):
            # One that drops tokens shows fewer, but no other.
            held = shown.scatter(1, ids, False).logical_not() if router.drops else shown.gather(1, ids)
        elif shown.dtype != torch.bool and shown.shape == ids.shape:
            held = (
                shown.sort(dim=1).values == ids.sort(dim=1).values
            )  # a router may return them in another order
        else:
            held = torch.zeros_like(ids, dtype=torch.bool)
        self._looked.append((router, number, again, "ids", held))

    def add(self, asked: Asked, right: torch.Tensor) -> None:
        """Add what else was asked of a call, and bool [rows, topk]: for which of its ids is it right?"""
        self._looked.append((*asked, right))

    def first_wrong(self, *, on_accelerators: bool) -> Asked | None:
        """The first call whose output doesn't show all of its ids, so far as it is to be read now."""
        looked, self._looked = self._looked, []
        if looked and not (on_accelerators or looked[0][4].is_cpu):
            self._looked = looked
        elif looked and not _all([one[4] for one in looked]):
            return next((Asked(*one[:4]) for one in looked if not bool(one[4].all())), None)
        return None

    def forget(self, label: int, number: int) -> None:
        """The forward of this call raised."""
        gone = label, number, False
        self._looked = [one for one in self._looked if (one[0].label, *one[1:3]) != gone]

    def clear(self) -> None:
        """The block is over."""
        self._looked.clear()


def _all(flags: list[torch.Tensor]) -> bool:
    """Are all set, so far as they can be looked at together?"""
    try:
        return bool(torch.cat(flags).all())
    except RuntimeError:  # of other top-ks, or on several devices
        return False
