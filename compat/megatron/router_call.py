"""What the seam does in a call of a Megatron router that chooses in another way than by one plain top-k."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from npu_replay.compat.megatron import fused_router
from npu_replay.sessions import seam
from npu_replay.sessions.capacity import CapacityCall
from npu_replay.sessions.hooks import outside_modes


class MegatronCall(CapacityCall):
    """A call of a router that is fused, or asks for more experts than it uses.

    Args:
        drops: tokens over an expert's capacity are dropped.
        spare: the router asks its top-k for so many more than it uses; they come last, and stay its own.
    """

    def __init__(self, *about: Any, drops: bool = False, spare: int = 0, **options: Any) -> None:
        super().__init__(*about, **options)
        self.drops = drops
        self.spare = spare

    def _wants(self, k: object, dim: object) -> bool:
        asked = k - self.spare if isinstance(k, int) and self.ids is None else k
        return super()._wants(asked, dim)

    def answer(
        self, native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], way: str
    ) -> Any:
        """Answer the top-k; `ids` are those that the router uses."""
        answered = super().answer(native, args, kwargs, way)
        if self.spare and self.ids is not None:
            self.ids = self.ids[:, : self.topk]
            with outside_modes():  # what the router got are its top-k's own
                self.values = self.unmasked(self.scores).detach().gather(1, self.ids)
            self.made = None
        return answered

    def _decide(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.spare:
            return super()._decide(scores)
        with outside_modes():
            ids = self.choose(self)
        return self._with_spare(scores, ids)

    def _with_spare(self, scores: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, places = self._native(scores, *self._args, **self._kwargs)
        self.handed = None  # the router gets these, and no copy of the ids alone
        return values, torch.cat([ids, places[:, self.topk :]], dim=1)

    def _native_ids(self, scores: torch.Tensor) -> torch.Tensor:
        return super()._native_ids(scores)[:, : self.topk]

    def note(self, read: Callable[[], torch.Tensor]) -> None:
        """Take down what a fused kernel chose, which no top-k can be answered for.

        Args:
            read: gives the ids, int64 [rows, topk]; what it does is not the router's doing any more.
        """
        seam.arm(None)
        self.own_ids = read()
        self._noted(self.own_ids)
        self.ids, self.way = self.own_ids, "fused"

    def _noted(self, ids: torch.Tensor) -> None:
        """Others may have been wanted, as in a recompute."""
        wanted = self.choose(self)
        if wanted is not ids:
            self.strayed = (wanted != ids).any()


def of(router: Any, *, drops: bool) -> Callable[..., seam.Call] | None:
    """What makes the seam's part in a call of this router; None where it is the plain one."""
    if not spare(router) and not fused_router.is_on(router.config):
        return None
    return functools.partial(MegatronCall, drops=drops, spare=spare(router))


def spare(router: Any) -> int:
    """Quantile balancing asks for one expert more than it uses: its score says where the limit lies."""
    return int(router.routing_type == "quantile_balancing")
