"""observe: read what the routers' outputs show, without changing their choice.

It reads outputs after the fact, so it shows whether a replay had an effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from npu_replay.errors import ReplayError, micro_batch
from npu_replay.routers import Model, Router, as_map, hidden_states
from npu_replay.routes.routed_experts import RoutedExperts, narrow_dtype
from npu_replay.seam.backward import in_backward
from npu_replay.seam.id_uses import IdUses
from npu_replay.seam.torch_state import Hook
from npu_replay.seam.watch import watch
from npu_replay.sessions.effect import not_called
from npu_replay.sessions.micro_batch import Key, MicroBatch, of_all_chunks
from npu_replay.sessions.record import micro_batch_routes
from npu_replay.sessions.session import Session, Work, to_enter

if TYPE_CHECKING:
    from npu_replay.sessions.timeline import Marks


def observe(model: Model) -> Observation:
    """Read the experts that the routers' outputs show.

    It changes nothing, and may be open around or inside a replay: then it shows what the replay did.

    >>> with torch.no_grad(), npu_replay.observe(model) as observation:
    ...     output = model(batch)
    >>> observation.shown
    [RoutedExperts(24 tokens, 2 layers, top-2 of 8, 0 rows without a route)]

    Args:
        model: the module that the training loop calls, or the list of virtual-pipeline chunks.

    Raises:
        ReplayError: on entering, if a router is in another `observe`, or has another top-k or number of
            experts than the rest; in the block, if a forward leaves one out or calls it several times; on
            leaving, if nothing ran; and when `shown` is read before the block has ended.
    """
    return to_enter(Observation(model))


class Observation(Session):
    """Reads what the routers' outputs show; `shown` holds it when the block has ended."""

    name = "observe"

    def __init__(self, model: Model) -> None:
        self._reading = Reading()
        super().__init__(model, self._reading)
        self._shown: list[RoutedExperts] | None = None

    @property
    def shown(self) -> list[RoutedExperts]:
        """Return one RoutedExperts a micro-batch.

        A row that shows fewer than top-k experts in a layer (dropped over an expert's capacity) can't be
        replayed, and is not recorded in any layer. `compare` takes the experts that are left.
        """
        if self._shown is None:
            raise ReplayError(
                "what was shown is complete when the block has ended without an exception",
                expected="an ended block",
                got="an open one, or one that raised",
            )
        return self._shown

    def _finish(self) -> None:
        routers = self.all_routers
        shown: list[RoutedExperts] = []
        for number in range(self.done):
            ids, lost = of_all_chunks(self._reading.read, len(self.chunks), number)
            for router in routers:
                if router.label not in ids:
                    raise not_called(router, number)
            shown.append(_routes(ids, lost, routers, micro_batch(number)))
        self._shown = shown
        self._results = f", {sum(map(len, shown))} rows"


def _routes(
    ids: dict[int, torch.Tensor], lost: dict[int, torch.Tensor], routers: list[Router], where: str
) -> RoutedExperts:
    """Return what one micro-batch showed, with the experts that are left of each row that lost some."""
    whole = ~torch.stack([layer_lost.any(dim=1) for layer_lost in lost.values()]).any(dim=0) if lost else None
    if whole is None or bool(whole.all()):
        lost = {}
    return micro_batch_routes(ids, routers, where, lost, whole)


class Reading(Work):
    """Reads the outputs of every router of a model, in each forward."""

    def __init__(self) -> None:
        self._taking: dict[int, IdUses] = {}
        self.read: dict[Key, MicroBatch] = {}  # with the ids that outputs show

    def enters(self, session: Session) -> None:
        session.undo.callback(_unfollow, self._taking)

    def attach(self, session: Session, router: Router, chunk: int) -> None:
        if router.shows is None:
            session.before(router.module, Hook(self, Reading._follows, router.module, router))
        marks = session.marks[chunk]
        session.after(router.module, Hook(self, Reading._reads, router.module, router, marks))

    def clear(self) -> None:
        self.read.clear()

    def _follows(self, router: Router, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = hidden_states(args, kwargs)
        taken = IdUses(hidden.numel() // hidden.shape[-1], router.topk, router.num_experts)
        self._taking[router.label] = taken
        watch.follow(taken)

    def _reads(self, router: Router, marks: Marks, args: tuple[Any, ...], output: object) -> None:
        taken = self._taking.pop(router.label, None)
        if taken is not None:
            watch.unfollow(taken)
        if output is None or in_backward():
            return  # the router raised, or this is a recompute
        if marks.take_announced(router.module) is not None:
            return  # a recompute outside backward
        forward = marks.timeline.live(marks.chunk, router.label)
        if router.label in forward.ids:
            raise marks.timeline.called_again(router.label, forward)
        with torch.no_grad():
            if taken is not None:
                shown = taken.shown()
            elif router.shows is not None:
                shown = as_map(router.shows(output), router.num_experts)
            # argsort, since an armed call of an outer replay could answer a top-k.
            order = shown.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
            ids = order[:, : router.topk].to(narrow_dtype(router.num_experts))
            # More than top-k experts are as wrong as fewer, and tell no ids.
            present = shown.gather(1, ids.long()) & (shown.sum(dim=1, keepdim=True) <= router.topk)
        forward.ids[router.label] = ids.cpu()
        forward.lost[router.label] = ~present.cpu()
        self.read[forward.key] = forward


def _unfollow(taking: dict[int, IdUses]) -> None:
    for taken in list(taking.values()):
        watch.unfollow(taken)
    taking.clear()
