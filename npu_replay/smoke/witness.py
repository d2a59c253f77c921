"""What the routers of the smoke test put out, read by hooks that share nothing with npu_replay's sessions.

`record`, `replay` and `observe` tell micro-batches and recomputes apart by the same code, so a fault in it
would hide from all three; and `observe` leaves recomputes out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from npu_replay.routers import Router
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.smoke.model import routers_of


@dataclass(frozen=True)
class Seen:
    """One call of a router.

    Attributes:
        number: its micro-batch. A recompute belongs to the one whose forward had the nearest input.
        args, kwargs: what it was called with.
        shown: bool [rows, experts] on the CPU, the experts that its output sends tokens to.
    """

    router: Router
    number: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shown: torch.Tensor


class Witness:
    """Reads every router's output, for the length of a block.

    Attributes:
        forwards, recomputes: the calls outside and inside backward, in order.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.routers = routers_of(chunks)
        self.forwards: list[Seen] = []
        self.recomputes: list[Seen] = []
        self._handles: list[Any] = []

    def __enter__(self) -> Witness:
        for router in self.routers:
            read = functools.partial(self._read, router)
            self._handles.append(router.module.register_forward_hook(read, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _read(
        self, router: Router, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        mine = [one for one in self.forwards if one.router is router]
        given, shown = args[0].detach().clone(), shown_by(router, output).detach().to("cpu", copy=True)
        recomputes = torch._C._current_graph_task_id() != -1
        number = len(mine)
        if recomputes:
            number = min(mine, key=lambda one: float((given - one.args[0]).abs().max())).number
        seen = Seen(router, number, (given, *args[1:]), kwargs, shown)
        (self.recomputes if recomputes else self.forwards).append(seen)

    @property
    def rows(self) -> int:
        """Token-layers of the forwards."""
        return sum(len(seen.shown) for seen in self.forwards)

    def routes(self) -> list[RoutedExperts]:
        """What the forwards showed, one RoutedExperts a micro-batch."""
        routers = sorted(self.routers, key=lambda router: router.label)
        shown = {(seen.router.label, seen.number): seen.shown for seen in self.forwards}
        return [
            RoutedExperts(
                ids=torch.stack([_ids(shown[one.label, number], one.topk) for one in routers], dim=1),
                layers=[router.label for router in routers],
                num_experts=routers[0].num_experts,
            )
            for number in range(len(self.forwards) // len(routers))
        ]


def shown_by(router: Router, output: object) -> torch.Tensor:
    """Bool [rows, experts], read off a router's output."""
    if router.shows is None:
        raise TypeError(f"{router.path} is a whole block; smoke's model has none")
    return router.shows(output)


def calls(seen: Sequence[Seen]) -> set[tuple[int, int]]:
    """The (layer, micro-batch) of each call."""
    return {(one.router.label, one.number) for one in seen}


def differing(seen: Sequence[Seen], routes: Sequence[RoutedExperts]) -> int:
    """Rows of these calls that show other experts than these routes, where they have any."""
    total = 0
    for one in seen:
        route = routes[one.number]
        ids = route.layer_ids(one.router.label).long()
        if len(ids) != len(one.shown):
            total += len(one.shown)
            continue
        wanted = torch.zeros_like(one.shown).scatter(1, ids, True)
        total += int(((one.shown != wanted).any(dim=1) & route.recorded).sum())
    return total


def _ids(shown: torch.Tensor, topk: int) -> torch.Tensor:
    """int64 [rows, topk], ascending."""
    return shown.to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :topk]
