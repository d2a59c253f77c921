"""Ask routers for their own choice during a replay: for live_mismatch, overlap and aux losses.

Overlap is the share of the experts given to a router that it would choose by itself, too. Routes of the
right tokens overlap by 0.8 to 1, since rounding changes few experts. Routes of another token, layer or
sample overlap by chance. Chance depends on how evenly the experts are used, so it is measured: as the
overlap of each token's routes with the choices of all other tokens (docs/dev/overlap.md).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from npu_replay.environment import AUX_LOSS, MIN_OVERLAP, read
from npu_replay.errors import MicroBatchError, micro_batch, one_of, share
from npu_replay.routers import Handle, Router, check_losses
from npu_replay.routes.checks import Array
from npu_replay.routes.inputs import parameter_names
from npu_replay.routes.routed_experts import RoutedExperts, narrow_dtype
from npu_replay.sessions import seam
from npu_replay.sessions.effect import Count
from npu_replay.sessions.micro_batches import Forward
from npu_replay.sessions.route_source import DeviceRoutes

AuxLoss: TypeAlias = Literal["live", "replayed"]

RUN = 64
"""The least number of judged rows, and the length of judged runs of consecutive tokens."""
_LEAST, _MOST = 0.15, 0.25
"""Limits of the expected overlap, as a part of the way from chance to 1.

Right routes at 4 bits had 0.19 and more, wrong ones less than 0.1, a wrong layer among right ones up to 0.2.
"""
_SHIFTS = 64
_LAYERS = 8  # number of layers compared for a shift


class OwnChoice:
    """Asks routers that are given ids for their own choice, if an option of `replay` needs it."""

    def __init__(
        self,
        *,
        live_mismatch: bool = False,
        min_overlap: float | None = None,
        aux_loss: AuxLoss | None = None,
    ) -> None:
        if aux_loss is not None:
            one_of(aux_loss, ("live", "replayed"), "aux_loss")
        self._aux_loss = read(AUX_LOSS, "live") if aux_loss is None else aux_loss
        self._counts_live = False
        self._overlap = OverlapCheck(min_overlap)
        self._is_compared = live_mismatch
        self._differing, self._compared = Count(), 0
        # For each call in the running forward: a flag for each row, and the number of compared rows.
        self._running: list[tuple[torch.Tensor, int]] = []

    def enters(self, routers: Sequence[Router]) -> None:
        losses = any(router.aux_losses is not None for router in routers)
        self._counts_live = losses and self._aux_loss == "live"

    def recount(self, router: Router, calls: object) -> Handle | None:
        """Make a router's aux losses count as `aux_loss` says in these calls; None if they do so already."""
        losses, replayed = router.aux_losses, self._aux_loss == "replayed"
        if losses is None or losses.follow == replayed:
            return None
        owner = weakref.ref(calls)

        def counted() -> tuple[torch.Tensor, torch.Tensor] | None:
            call = None if (alive := owner()) is None else seam.running(alive)
            if call is None or call.ids is None:
                return None
            ids = call.ids if replayed else call.own_ids
            return None if ids is None else (ids, call.ids)

        return losses.recount(counted)

    def check_losses(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse a call of the model with a loss that can't count the replayed experts as asked."""
        if self._aux_loss == "replayed":
            check_losses(module, dict(zip(parameter_names(module), args, strict=False)) | dict(kwargs))

    def count_in(self, call: seam.Call) -> None:
        """Find the router's own choice, if its aux losses count that in this call."""
        if not self._counts_live:
            return
        router = call.owner.router
        if (losses := router.aux_losses) is not None and losses.follow_the_call_of(router.module):
            call.own()

    def compare(
        self, call: seam.Call, given: torch.Tensor, missing: torch.Tensor | None, routes: DeviceRoutes
    ) -> None:
        """Compare the given ids, int64 [rows, topk], with the router's own; `missing` rows don't count."""
        self.count_in(call)
        if self._is_compared:
            differ = (given.sort(dim=1).values != call.own().sort(dim=1).values).any(dim=1)
            if missing is not None:
                differ[missing] = False
            self._running.append((differ, len(differ) - (0 if missing is None else len(missing))))
        if self._overlap.asks(call.forward, routes.routes):
            self._overlap.add(call.owner.label, call.num_experts, given, call.own(), missing)

    def ends(self, chunk: int, forward: Forward | None, given: DeviceRoutes | None) -> None:
        """Count and judge the calls of a forward, None if it raised; MicroBatchError for a low overlap."""
        shown, self._running = self._running, []
        for differ, compared in shown if forward is not None else ():
            self._differing.add(differ)
            self._compared += compared
        self._overlap.check(chunk, None if forward is None else forward.number, given)

    def counts(self) -> dict[str, int]:
        """Return numbers of token-layers, compared and differing, and of experts, judged and shared."""
        figures = {"differing": int(self._differing), "compared": self._compared}
        return figures | {"shared": self._overlap.shared, "given": self._overlap.given}


class _Call(NamedTuple):
    hits: torch.Tensor  # [rows], how many of the experts that a row was given are its own choice, too
    loads: torch.Tensor  # int64 [2, num_experts], how many rows were given an expert, or would choose it
    own: torch.Tensor  # [rows, topk], its own choice


class OverlapCheck:
    """Refuses routes of a rollout engine that are far from what the routers would choose for their tokens.

    The first forwards of each chunk are judged, until 64 rows with a route were seen.

    Args:
        least: overlap below which any routes are refused, 0 to 1; 0 refuses none. None: for an engine's
            routes only, NPU_REPLAY_MIN_OVERLAP, else 0.15 to 0.25 of the way from chance to 1.
    """

    def __init__(self, least: float | None) -> None:
        self._judges_all = least is not None
        self._least = read(MIN_OVERLAP)
        if least is not None:
            self._least = share(least, "min_overlap", "experts that were given")
        self.given = 0  # experts that were judged
        self.shared = 0  # of these, experts that the routers chose, too
        self._judged: set[int] = set()
        self._calls: dict[int, _Call] = {}  # by layer, in the running forward
        # By chunk, hits and loads of its forwards so far, which together had fewer than 64 rows.
        self._before: dict[int, tuple[Array, Array]] = {}

    def asks(self, forward: Forward, routes: RoutedExperts) -> bool:
        """Return whether the routers' own choice is needed in this forward. It costs a top-k."""
        if forward.chunk in self._judged or self._least == 0:
            return False
        return self._judges_all or routes.from_engine

    def add(
        self,
        label: int,
        num_experts: int,
        given: torch.Tensor,
        own: torch.Tensor,
        missing: torch.Tensor | None,
    ) -> None:
        """Record the ids that a router was given and those it would choose, int64 [rows, topk] each."""
        counts = torch.ones_like(given)
        if missing is not None:
            counts[missing] = 0
        loads = torch.zeros(2, num_experts, dtype=torch.int64, device=given.device)
        loads.scatter_add_(1, torch.stack([given, own]).flatten(1), counts.flatten().expand(2, -1))
        hits = (given[:, :, None] == own[:, None, :]).flatten(1).sum(dim=1)
        narrow = narrow_dtype(num_experts + 1)  # a count may be num_experts
        self._calls[label] = _Call(hits.to(narrow), loads, own.to(narrow))

    def check(self, chunk: int, number: int | None, given: DeviceRoutes | None) -> None:
        """Judge a forward at its end, if `add` was called in it; `number` is None for one that raised.

        Waits for the device. The error names the layers or tokens, and a shift that would fit.
        """
        calls, self._calls = self._calls, {}
        if number is None or given is None or not calls:
            return
        labels, routes, before = sorted(calls), given.routes, 0
        rows = rows_by_token(routes)
        hits = np.stack([calls[label].hits.cpu().numpy() for label in labels])[:, rows]  # [layers, rows]
        loads = np.stack([calls[label].loads.cpu().numpy() for label in labels])
        if chunk in self._before:
            earlier, their_loads = self._before.pop(chunk)
            hits, loads, before = np.concatenate([earlier, hits], 1), their_loads + loads, earlier.shape[1]
        if hits.shape[1] < RUN:
            self._before[chunk] = hits, loads
            return
        self._judged.add(chunk)
        self.shared += int(hits.sum(dtype=np.int64))
        self.given += hits.size * routes.topk
        where, got, least, at, fits = self._judge(hits, loads, before, labels, routes, rows)
        moved = find_shift(calls, rows, given.ids.numpy()[rows], at, fits)
        if not where and moved is None:
            return
        expected = f"an overlap of {least:.2f} or more with the routers' own choice"
        cause = (
            "routes of another sample, another micro-batch or other weights; rows in another order "
            "(TokenLayout's order=, side=); layers in another order; or an engine that returned rows of "
            "an earlier request. "
            f"min_overlap= or {MIN_OVERLAP} sets what is expected, and 0 switches this check off"
        )
        if moved is not None:
            by, there, got = moved
            expected = f"rows in their places: moved by {by:+} they overlap by {there:.2f}"
            cause = f"a row too many or too few before these, from padding or from another prompt; {cause}"
        problem = "the routes are far from what the routers would choose for these tokens"
        where = f"{micro_batch(number)}, chunk {chunk}, {where or 'all layers'}"
        raise MicroBatchError(problem, where=where, expected=expected, got=f"{got:.2f}", cause=cause)

    def _judge(
        self, hits: Array, loads: Array, before: int, labels: list[int], routes: RoutedExperts, rows: Array
    ) -> tuple[str, float, float, int, float]:
        """Find layers, or else 64 consecutive tokens, that overlap too little.

        Returns:
            their name, "" if there are none; their overlap and its floor; the first row of the lowest 64;
            the overlap that rows must have elsewhere for a shift to be named.
        """
        topk, count = routes.topk, hits.shape[1]
        shares = hits / topk
        overlap = shares.mean(axis=1)
        # Chance: the pairs of a given and a chosen expert in different rows that are the same expert.
        pairs = (loads[:, 0] * loads[:, 1]).sum(axis=1) - hits.sum(axis=1, dtype=np.int64)
        chance = pairs / (topk * count * (count - 1))
        # A quarter of the best layer's way: a coarsely quantized rollout lowers all layers. A wrong layer
        # lowers those behind it too, since their inputs come from other experts; those before it stay high.
        best = ((overlap - chance) / np.maximum(1 - chance, 1e-9)).max()
        way = float(np.clip(best / 4, _LEAST, _MOST))

        def floor_of(chance: Array, deviation: Array, rows: int) -> Array:
            # Two standard errors below the expected overlap of this number of rows.
            expected = chance + way * (1 - chance) if self._least is None else self._least
            floor: Array = expected - 2 * deviation / np.sqrt(rows)
            return floor

        where, at = "", 0
        floor = floor_of(chance, shares.std(axis=1), count)
        got, least = overlap[0], floor[0]
        if len(low := np.flatnonzero(overlap < floor)):
            named = ", ".join(str(labels[one]) for one in low[:8]) + (", ..." if len(low) > 8 else "")
            where = f"all {len(low)} layers" if len(low) == len(labels) > 1 else f"layer {named}"
            worst = low[(overlap - floor)[low].argmin()]
            got, least = overlap[worst], floor[worst]
        each = shares[:, before:].mean(axis=0)
        if len(each) >= RUN:  # the lowest of all runs of consecutive tokens
            sums = np.concatenate([[0.0], each.cumsum()])
            at = int((sums[RUN:] - sums[:-RUN]).argmin())
            run = each[at : at + RUN]
            floor = floor_of(chance.mean(), run.std(), RUN)
            if not where and run.mean() < floor:
                where, got, least = tokens_of(routes, rows, at), run.mean(), floor
        # Wrong rows fit better almost anywhere else: so a shift is named only if rows fit well there.
        fits = (1 + chance.mean()) / 2 if where else chance.mean()
        return where, float(got), float(least), at, float(fits)


def rows_by_token(routes: RoutedExperts) -> Array:
    """Return the rows that have a route, int64, in the order of their tokens."""
    if routes.placed is None:
        return np.flatnonzero(routes.recorded.numpy())
    order: Array = np.argsort(routes.placed[0].numpy(), kind="stable")
    rows: Array = order[routes.recorded.numpy()[order]]
    return rows


def tokens_of(routes: RoutedExperts, rows: Array, at: int) -> str:
    """Return the name of the tokens of the 64 rows from `at` on."""
    first, last = int(rows[at]), int(rows[at + RUN - 1])
    if routes.placed is None:
        return f"rows {first} to {last}"
    tokens, starts = routes.placed[0], np.cumsum([0, *routes.placed[1]])
    first, last = int(tokens[first]), int(tokens[last])
    one, other = (int(number) - 1 for number in np.searchsorted(starts, (first, last), side="right"))
    to = "" if one == other else f"sequence {other}, "
    return f"sequence {one}, tokens {first - starts[one]} to {to}{last - starts[other]}"


def find_shift(
    calls: dict[int, _Call], rows: Array, given: Array, at: int, least: float
) -> tuple[int, float, float] | None:
    """Return by how many rows routes that fit better elsewhere are moved, and the overlap there and here.

    Neighbouring tokens choose alike, so a shift must overlap by four standard errors more, and by `least`.
    Compares 256 rows from `at` on, in eight layers.
    """
    some = slice(None, None, max(1, len(calls) // _LAYERS))
    looked = np.arange(at, min(at + 4 * RUN, len(rows)))
    own = np.stack([calls[label].own.cpu().numpy()[rows[looked]] for label in sorted(calls)[some]], axis=1)
    given = given[:, some]

    def overlaps(shift: int, kept: Array) -> Array:
        moved = given[(looked + shift)[kept]]
        each: Array = (moved[..., :, None] == own[kept][..., None, :]).sum(axis=(1, 2, 3)) / moved[0].size
        return each

    best, here = None, overlaps(0, np.ones(len(looked), bool))
    for shift in range(-_SHIFTS, _SHIFTS + 1):
        kept = (looked + shift >= 0) & (looked + shift < len(rows))
        if kept.sum() < 0.75 * len(looked):
            continue
        there = overlaps(shift, kept)
        gain = there - here[kept]
        if gain.mean() > 4 * gain.std() / math.sqrt(len(gain)) and there.mean() > least:
            least = float(there.mean())
            best = -shift, least, float(here[kept].mean())
    return best
