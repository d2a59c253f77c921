"""Padding in the counts that the expert bias is updated from.

`TopKRouter._apply_expert_bias` of Megatron-core 0.16 to 0.19 lays its padding mask, [rows], over the map's
experts and not over its rows: an error, or with as many rows as experts counts of the wrong tokens. Given the
mask as [rows, 1] it counts right, so a method on each router with a bias gives it that. Later releases are
right by themselves, and would be wrong with that; so each function is asked first.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import torch

from npu_replay.compat.megatron_backports import router_methods
from npu_replay.errors import described

logger = logging.getLogger(__name__)

_METHOD = "_apply_expert_bias"


class PaddedCounts(router_methods.Lent):
    """A router's counts, of unpadded rows."""

    why = "leaves padding out of the counts for the expert bias"

    def _apply_expert_bias(self, routing_map: torch.Tensor, padding_mask: torch.Tensor | None = None) -> None:
        """Add a map's tokens to the router's counts.

        Args:
            routing_map: bool [rows, experts].
            padding_mask: bool [rows], True for padding.
        """
        router = self.router
        native = getattr(type(router), _METHOD)  # looked up: somebody else may have mended it since
        if padding_mask is not None and padding_mask.dim() == 1 and wants_column(native):
            padding_mask = padding_mask.unsqueeze(-1)
        native(router, routing_map, padding_mask=padding_mask)


def equip(router: Any) -> None:
    """Have a router's counts leave padding out, where its class gets that wrong. Twice is as good as once."""
    native = getattr(type(router), _METHOD, None)
    if native is not None and getattr(router, "enable_expert_bias", False) and wants_column(native):
        router_methods.lend(router, PaddedCounts, (_METHOD,))


@functools.lru_cache(maxsize=16)
def wants_column(native: Callable[..., None]) -> bool:
    """Does this `_apply_expert_bias` count right with the mask as [rows, 1], and not as [rows]?

    Found out on two rows and two experts; nothing is compiled for it. One that counts right with neither is
    left as it is, with a WARNING.
    """
    mask = torch.tensor([True, False], device="cpu")
    with _uncompiled():
        if _counts_second_row(native, mask):
            return False
        column = _counts_second_row(native, mask.unsqueeze(-1))
    if not column:
        logger.warning(
            "[npu_replay] %s doesn't leave padding out of the counts for the expert bias, and how to mend it "
            "isn't known; it is left as it is",
            described(native),
        )
    return column


def _counts_second_row(native: Callable[..., None], mask: torch.Tensor) -> bool:
    both_to_the_first = torch.tensor([[True, False], [True, False]], device="cpu")
    router = SimpleNamespace(enable_expert_bias=True, local_tokens_per_expert=torch.zeros(2, device="cpu"))
    try:
        with torch.enable_grad():
            native(router, both_to_the_first, padding_mask=mask)
    except Exception:  # noqa: BLE001  whatever it raises, it isn't right
        return False
    return bool(router.local_tokens_per_expert.tolist() == [1, 0])


def _uncompiled() -> AbstractContextManager[Any]:
    """What is compiled runs as it is written; where dynamo isn't imported, nothing is compiled."""
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        return contextlib.nullcontext()
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return eager
