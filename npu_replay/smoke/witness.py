"""What the routers of the smoke test put out, read by a hook that shares nothing with npu_replay's sessions.

So that a fault of `record`, `replay` or `observe` can't hide itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
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
        args, kwargs: what it was called with.
        shown: bool [rows, experts], the experts that its output sends tokens to.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shown: torch.Tensor


class Witness:
    """Reads every router's output in the forwards, and in the recomputes inside backward.

    A recompute belongs to the micro-batch whose forward had the nearest input.
    """

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        self.routers = {router.label: router for router in routers_of(chunks)}
        self.forwards: dict[int, list[Seen]] = {label: [] for label in self.routers}
        self.recomputes: dict[int, list[tuple[int, Seen]]] = {label: [] for label in self.routers}
        self._handles: list[Any] = []

    def __enter__(self) -> Witness:
        for router in self.routers.values():
            hook = router.module.register_forward_hook(self._reads(router), with_kwargs=True)
            self._handles.append(hook)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()

    def _reads(self, router: Router) -> Callable[..., None]:
        def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
            copied = (args[0].detach().clone(), *args[1:])
            seen = Seen(copied, kwargs, router.shows(output).detach().clone())
            if torch._C._current_graph_task_id() == -1:
                self.forwards[router.label].append(seen)
            else:
                self.recomputes[router.label].append((self._nearest(router.label, seen), seen))

        return after

    def _nearest(self, label: int, seen: Seen) -> int:
        apart = [float((seen.args[0] - one.args[0]).abs().max()) for one in self.forwards[label]]
        return apart.index(min(apart))

    def routes(self) -> list[RoutedExperts]:
        """What the forwards showed, one RoutedExperts a micro-batch."""
        labels = sorted(self.routers)
        count = len(self.forwards[labels[0]])
        first = self.routers[labels[0]]
        return [
            RoutedExperts(
                ids=torch.stack([_ids(self.forwards[label][number], first.topk) for label in labels], dim=1),
                layers=labels,
                num_experts=first.num_experts,
            )
            for number in range(count)
        ]

    def differing(self, routes: Sequence[RoutedExperts]) -> int:
        """Rows of all routers' forwards that show other experts than these routes, where they have any."""
        return sum(
            _differing(seen, routes[number], label)
            for label, calls in self.forwards.items()
            for number, seen in enumerate(calls)
        )

    def differing_again(self, routes: Sequence[RoutedExperts]) -> int:
        """The same of the recomputes."""
        return sum(
            _differing(seen, routes[number], label)
            for label, calls in self.recomputes.items()
            for number, seen in calls
        )

    def calls(self) -> set[tuple[int, int]]:
        """The (layer, micro-batch) of each forward."""
        return {(label, number) for label, seen in self.forwards.items() for number in range(len(seen))}

    def calls_again(self) -> set[tuple[int, int]]:
        """The (layer, micro-batch) of each recompute."""
        return {(label, number) for label, seen in self.recomputes.items() for number, _ in seen}

    def rows(self) -> int:
        """Token-layers of the forwards."""
        return sum(len(seen.shown) for calls in self.forwards.values() for seen in calls)


def _ids(seen: Seen, topk: int) -> torch.Tensor:
    """int64 [rows, topk], ascending, on the CPU."""
    order = seen.shown.to(torch.int8).cpu().argsort(dim=1, descending=True, stable=True)
    return order[:, :topk]


def _differing(seen: Seen, routes: RoutedExperts, label: int) -> int:
    ids = routes.layer_ids(label).long()
    shown = seen.shown.cpu()
    if len(ids) != len(shown):
        return len(shown)
    wanted = torch.zeros_like(shown).scatter(1, ids, True)
    return int(((shown != wanted).any(dim=1) & routes.recorded).sum())
