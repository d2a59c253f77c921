"""observe: what the routers' own outputs show, without touching what they choose.

The witness of the others: it reads outputs after the fact, so it sees whether a replay had an effect, and
may be open around or inside one.
"""

from __future__ import annotations

import functools
from types import TracebackType
from typing import Any

import torch

from npu_replay.errors import MicroBatchError, NoEffect, ReplayError, micro_batch
from npu_replay.routers import Handle, Model, Router, chunks_of, find, mark
from npu_replay.routes.routed_experts import RoutedExperts, narrow_dtype, without_layers
from npu_replay.sessions.hooks import Hook
from npu_replay.sessions.marks import Marks
from npu_replay.sessions.micro_batches import CALLED_INSIDE, Timeline
from npu_replay.sessions.recompute import in_backward


class Observation:
    """What the routers' outputs showed; `shown` holds it when the block has ended."""

    def __init__(self, model: Model) -> None:
        self._chunks = chunks_of(model)
        self._timeline = Timeline(len(self._chunks))
        self._entered = False
        self._routers: list[Router] = []
        self._handles: list[Handle] = []
        self._marks: list[Marks] = []
        self._seen: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self._shown: list[RoutedExperts] | None = None

    def __repr__(self) -> str:
        state = f"open on {len(self._routers)} routers" if self._handles else "ended"
        rows = "" if self._shown is None else f", {sum(map(len, self._shown))} rows"
        batches = max(self._timeline.ended, default=0)
        return f"Observation({state if self._entered else 'not entered'}, {batches} micro-batches{rows})"

    @property
    def shown(self) -> list[RoutedExperts]:
        """One RoutedExperts a micro-batch. A row that shows fewer than top-k experts (dropped over an
        expert's capacity) is not recorded in any layer."""
        if self._shown is None:
            raise ReplayError(
                "what was shown is complete when the block has ended without an exception",
                expected="an ended block",
                got="an open one, or one that raised",
            )
        return self._shown

    def __enter__(self) -> Observation:
        if self._entered:
            raise ReplayError("this observe block was entered before", expected="a new one", got="a used one")
        found = find(self._chunks)
        self._entered = True
        self._routers = [router for routers in found for router in routers]
        try:
            self._attach(found)
        except BaseException:
            self._detach()
            self._clear()
            raise
        return self

    def _attach(self, found: list[list[Router]]) -> None:
        for chunk, routers in enumerate(found):
            module = self._chunks[chunk]
            begins, ends = (
                Hook(self, act, module, chunk) for act in (Observation._begins, Observation._ends)
            )
            self._handles.append(module.register_forward_pre_hook(begins, with_kwargs=True))
            for router in routers:
                reads = Hook(self, Observation._reads, router.module, router, chunk)
                self._handles.append(router.module.register_forward_hook(reads))
            self._handles.append(module.register_forward_hook(ends, always_call=True))
            self._marks.append(Marks(functools.partial(self._timeline.number, chunk)))
            self._handles.extend(mark(module, routers, self._marks[chunk]))

    def _detach(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._detach()
        try:
            if kind is None:
                self._shown = [self._micro_batch(number) for number in range(self._checked_count())]
        finally:
            self._clear()

    def _clear(self) -> None:
        """The block is over: keep neither the model nor its routers."""
        self._seen.clear()
        for kept in (self._chunks, self._routers, self._handles, self._marks):
            kept.clear()

    def _checked_count(self) -> int:
        """The number of micro-batches; that there are any, and the same in every chunk."""
        ended = self._timeline.ended
        if min(ended) != max(ended) or max(ended) == 0:
            raise MicroBatchError(
                "the chunks ran different numbers of forwards" if max(ended) else "nothing ran in this block",
                expected="each chunk's __call__ once for each micro-batch",
                got=ended,
                cause="another module is called than the one that was passed"
                if self._timeline.bypassed is None
                else CALLED_INSIDE,
            )
        return ended[0]

    def _begins(self, chunk: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not in_backward():
            self._marks[chunk].clear()
            self._timeline.begin(chunk)

    def _ends(self, chunk: int, args: tuple[Any, ...], output: object) -> None:
        if not in_backward():
            self._timeline.end(chunk, output)

    def _reads(self, router: Router, chunk: int, args: tuple[Any, ...], output: object) -> None:
        if in_backward() or self._marks[chunk].take_announced(router.module) is not None:
            return  # a recompute
        with torch.no_grad():
            shown = router.shows(output)
            # Not by a top-k: an armed router further out would take it for its own.
            order = shown.to(torch.uint8).argsort(dim=1, descending=True, stable=True)
            ids = order[:, : router.topk].to(narrow_dtype(router.num_experts))
            whole = shown.sum(dim=1) == router.topk
        self._seen[router.label, self._timeline.live(chunk).number] = ids.cpu(), whole.cpu()

    def _micro_batch(self, number: int) -> RoutedExperts:
        if not self._routers:
            return without_layers()
        routers = sorted(self._routers, key=lambda router: router.label)
        for router in routers:
            if (router.label, number) not in self._seen:
                raise NoEffect(
                    "the router was not called",
                    where=micro_batch(number, router.label),
                    expected="one call of each router in a forward",
                    got="none",
                    cause="a layer that this forward skipped, or a compiled graph that runs no hook",
                )
        seen = [self._seen[router.label, number] for router in routers]
        return RoutedExperts(
            ids=torch.stack([ids for ids, _ in seen], dim=1),
            layers=[router.label for router in routers],
            num_experts=routers[0].num_experts,
            recorded=torch.stack([whole for _, whole in seen]).all(dim=0),
        )


def observe(model: Model) -> Observation:
    """Read the experts that the routers' outputs show.

    with npu_replay.observe(model) as observation:
        model(...)
    observation.shown  # one RoutedExperts a micro-batch
    """
    return Observation(model)
