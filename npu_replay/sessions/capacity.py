"""A router that drops tokens over an expert's capacity: its second top-k, down the columns, says which."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from npu_replay.sessions import seam
from npu_replay.sessions.hooks import outside_modes


class CapacityCall(seam.Call):
    """A call of a router that drops tokens over an expert's capacity, by a second top-k, down the columns.

    That one may not drop a chosen expert with a probability of exactly zero for a token that nobody sent
    there, as ids that were given may have.
    """

    drops = True

    def _wants(self, k: object, dim: object) -> bool:
        return super()._wants(k, dim) if self.ids is None else dim in (0, -2)

    def answer(
        self, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], way: str
    ) -> Any:
        """Answer the top-k over the experts, and then the one over the tokens."""
        if self.ids is not None:
            return self._drop(native, args, kwargs, self.ids)
        answered = super().answer(native, args, kwargs, way)
        if self.given and self.drops:
            seam.arm(self)
        return answered

    def _drop(
        self, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], ids: torch.Tensor
    ) -> Any:
        """The choice of whom to drop, made anew for experts to which a token was lost that was sent there.

        Elsewhere it stays the router's own, also among equals. Where it doesn't, fewer positive scores than
        places are in the column, so none of them is dropped either way.
        """
        seam.arm(None)
        scores = args[0] if args else kwargs.pop("input")
        kept = native(scores, *args[1:], **kwargs)
        if not scores.is_floating_point():
            return kept
        with outside_modes():
            found = scores.detach()
            chosen = torch.zeros_like(found, dtype=torch.bool).scatter(1, ids, True)
            lifted = found.masked_fill(chosen & (found == 0), least_positive(found.dtype))
            again = native(lifted, *args[1:], **kwargs)[1]
            lost = chosen.gather(0, kept[1]).sum(dim=0) < chosen.gather(0, again).sum(dim=0)
            places = torch.where(lost, again, kept[1])
        return torch.return_types.topk((scores.gather(0, places), places))


def least_positive(dtype: torch.dtype) -> float:
    """A number above zero that is no weight, and that no device flushes to zero."""
    return max(2.0**-24 if dtype == torch.float16 else 0.0, torch.finfo(torch.float32).tiny)
