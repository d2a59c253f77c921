"""Ask routers for their own choice during a replay: for live_mismatch, overlap and aux losses."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from npu_replay.environment import AUX_LOSS, MIN_OVERLAP, read
from npu_replay.errors import MicroBatchError, one_of, share
from npu_replay.routers import Handle, Router, check_losses
from npu_replay.routes.checks import Array
from npu_replay.routes.host_copies import Count
from npu_replay.routes.inputs import named
from npu_replay.routes.overlap import RUN, Judged, Misfit, judge
from npu_replay.routes.routed_experts import RoutedExperts, narrow_dtype
from npu_replay.seam.call import Call, running
from npu_replay.sessions.weights import weights_moved

if TYPE_CHECKING:
    from npu_replay.sessions.micro_batch import MicroBatch
    from npu_replay.sessions.route_source import DeviceRoutes, Given

AuxLoss: TypeAlias = Literal["live", "replayed"]

logger = logging.getLogger(__name__)


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
        self._differing = Count()
        self._compared = 0

    def enters(self, routers: Sequence[Router]) -> None:
        losses = any(router.aux_losses is not None for router in routers)
        self._counts_live = losses and self._aux_loss == "live"

    def recount(self, router: Router, calls: object) -> Handle | None:
        """Make a router's aux losses count as `aux_loss` says in these calls; None if they do so already."""
        losses = router.aux_losses
        replayed = self._aux_loss == "replayed"
        if losses is None or losses.follow == replayed:
            return None
        owner = weakref.ref(calls)

        def counted() -> tuple[torch.Tensor, torch.Tensor] | None:
            call = None if (alive := owner()) is None else running(alive)
            if call is None or call.ids is None:
                return None
            ids = call.ids if replayed else call.own_ids
            return None if ids is None else (ids, call.ids)

        return losses.recount(counted)

    def begins(
        self, forward: MicroBatch, module: nn.Module, device_routes: DeviceRoutes | None, is_known: bool
    ) -> None:
        """Decide what `compare` does in a forward; `is_known`: its tokens are compared elsewhere."""
        forward.is_judged = self._overlap.judges(forward, module, device_routes, is_known)
        forward.compares = self._is_compared or self._counts_live or forward.is_judged

    def check_losses(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Refuse a call of the model with a loss that can't count the replayed experts as asked."""
        if self._aux_loss == "replayed":
            check_losses(module, named(args, kwargs, module))

    def count_in(self, call: Call) -> None:
        """Find the router's own choice, if its aux losses count that in this call."""
        if not self._counts_live:
            return
        router = call.owner.router
        if (losses := router.aux_losses) is not None and losses.follow_the_call_of(router.module):
            call.own()

    def compare(self, call: Call, ids: torch.Tensor, routes: Given) -> None:
        """Compare the ids of these routes, int64 [rows, topk], with the router's own choice.

        Rows without a route don't count.
        """
        self.count_in(call)
        forward: MicroBatch = call.micro_batch
        if self._is_compared:
            differ = (ids.sort(dim=1).values != call.own().sort(dim=1).values).any(dim=1)
            if routes.missing is not None:
                differ[routes.missing] = False
            rows = len(differ) - (0 if routes.missing is None else len(routes.missing))
            forward.differing.append((differ, rows))
        if forward.is_judged:
            forward.own_choices[call.owner.label] = _Call(routes, call.own().to(routes.narrow.dtype))

    def ends(self, forward: MicroBatch, device_routes: DeviceRoutes | None) -> None:
        """Count and judge the calls of a forward; raise MicroBatchError for a low overlap."""
        for differ, compared in forward.differing:
            self._differing.add(differ)
            self._compared += compared
        if forward.own_choices and device_routes is not None:
            self._overlap.check(forward, device_routes)

    @property
    def has_judged(self) -> bool:
        """Return whether some routes were compared with the routers' own choice."""
        return self._overlap.given > 0 or self._compared > 0

    def warn_of_few_rows(self) -> None:
        """Log once in a process that routes had too few rows to be judged."""
        if (rows := self._overlap.waiting) and not _warned_of_few_rows:
            _warned_of_few_rows.append(True)
            logger.warning(
                "[npu_replay] these routes weren't compared with the routers' own choice: the block had %d "
                "rows, and below %d right rows can't be told from wrong ones. live_mismatch=True shows how "
                "far they are apart",
                *(rows, RUN),
            )

    def counts(self) -> dict[str, int]:
        """Return numbers of token-layers, compared and differing, and of experts, judged and shared."""
        figures = {"differing": int(self._differing), "compared": self._compared}
        return figures | {"shared": self._overlap.shared, "given": self._overlap.given}


_warned_of_few_rows: list[bool] = []


class _Call(NamedTuple):
    routes: Given
    own: torch.Tensor  # the router's own choice, narrow [rows, topk]: kept until its forward ends


_MOST_PAIRS = 2**24
"""How many pairs of a given and a chosen expert are compared at once (16 MB)."""


class OverlapCheck:
    """Judges whether routes are near what the routers would choose for their tokens (routes/overlap.py).

    Each chunk's first 64 rows with a route are judged, and then micro-batches 1, 2, 4, 8, ... and the last.
    With a limit of one's own every micro-batch is judged. An engine's routes that are too far off are
    refused. Of routes made by hand, or whose tokens nobody can compare, one WARNING says so: those made for a
    test are random on purpose.

    Args:
        least: overlap below which any routes are refused, 0 to 1; 0 refuses none. None:
            NPU_REPLAY_MIN_OVERLAP, else 0.15 to 0.25 of the way from chance to 1.
    """

    def __init__(self, least: float | None) -> None:
        self._judges_all = least is not None
        self._least = read(MIN_OVERLAP)
        if least is not None:
            self._least = share(least, "min_overlap", "experts that were given")
        self.given = 0  # experts that were judged
        self.shared = 0  # of these, experts that the routers chose, too
        self._moved = self._warned = False
        self._judged: set[int] = set()
        self._before: dict[int, Judged] = {}  # by chunk, rows so far, as long as they are fewer than 64

    @property
    def waiting(self) -> int:
        """Return the number of rows that wait for more to be judged with, if none was judged."""
        return 0 if self._judged else max((len(judged.given) for judged in self._before.values()), default=0)

    def judges(
        self, forward: MicroBatch, module: nn.Module, device_routes: DeviceRoutes | None, is_known: bool
    ) -> bool:
        """Return whether this forward is judged, which costs a top-k a call; `is_known` as in `begins`."""
        # Tensors inside torch.func.grad have no memory that numpy could read.
        if device_routes is None or self._least == 0 or torch._C._functorch.maybe_current_level() is not None:
            return False
        chosen_by_engine = device_routes.routes.from_engine
        refuses = self._judges_all or bool(chosen_by_engine)
        # An engine's first rows are judged before an optimizer steps, however few a micro-batch has.
        begins = refuses and forward.chunk not in self._judged
        is_recording = is_known and chosen_by_engine is False
        if not (begins or self._judges_all or (forward.checked and not is_recording)):
            return False
        self._moved = weights_moved(module, device_routes.routes.made_at, grad=forward.grad)
        return True

    def check(self, forward: MicroBatch, device_routes: DeviceRoutes) -> None:
        """Judge the calls of a forward at its end; waits for the device.

        The error names the layers or tokens, and a shift that would fit.
        """
        chunk = forward.chunk
        calls: dict[int, _Call] = forward.own_choices
        labels = sorted(calls)
        routes = device_routes.routes
        rows = rows_by_token(routes)
        own, hits, loads = _counted(calls, labels)
        judged = Judged(
            device_routes.ids.numpy()[rows],
            own.transpose(1, 0, 2)[rows],
            hits[:, rows],
            loads,
            starts_of(routes, rows),
        )
        before = self._before.pop(chunk, None)
        if before is not None:
            judged = before.followed_by(judged)
        if len(judged.given) < RUN:
            self._before[chunk] = judged
            return
        self._judged.add(chunk)
        self.shared += int(judged.hits.sum(dtype=np.int64))
        self.given += judged.hits.size * routes.topk
        earlier = 0 if before is None else len(before.given)
        misfit = judge(judged, least=self._least, before=earlier, moved=self._moved)
        if misfit is not None:
            error = _error(misfit, forward.place, labels, routes, rows, earlier)
            self._refuse(error, misfit, routes)

    def _refuse(self, error: MicroBatchError, misfit: Misfit, routes: RoutedExperts) -> None:
        if routes.from_engine or self._judges_all:
            raise error
        if not self._warned:
            self._warned = True
            logger.warning(
                "[npu_replay] %s: the routers would choose %.0f %% of the given experts for these tokens, "
                "and chance gives %.0f %%. Rows may be in another order, or moved by some, or the routes of "
                "another micro-batch if they have no fingerprint (RoutedExperts(fingerprint=)). "
                "from_engine=True makes this an error; min_overlap=0 switches it off, for routes that are "
                "random on purpose",
                *(error.where, 100 * misfit.got, 100 * misfit.chance),
            )


def _counted(calls: Mapping[int, _Call], labels: Sequence[int]) -> list[Array]:
    """Count all layers' calls together, and copy to the host: each copy waits for the device.

    Returns:
        The own choices [layers, rows, topk]; `hits` and `loads` of `Judged`.
    """
    rows, topk = calls[labels[0]].own.shape
    size = max(1, _MOST_PAIRS // max(1, rows * topk * topk))
    parts = []
    for _, same in groupby(labels, key=lambda label: id(calls[label].routes)):  # those of one device
        of_device = list(same)
        for first in range(0, len(of_device), size):
            group = of_device[first : first + size]
            own = torch.stack([calls[label].own for label in group])
            hits, loads = _counts(calls[group[0]].routes, group, own)
            parts.append([tensor.cpu().numpy() for tensor in (own, hits, loads)])
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def _counts(routes: Given, labels: Sequence[int], own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `hits` and `loads` of `Judged`, of some layers with these own choices, [layers, rows, topk]."""
    num_experts = routes.routes.routes.num_experts
    columns = routes.routes.columns
    ids = torch.stack([routes.narrow[:, columns[label]] for label in labels])
    hits = (ids[..., None] == own[..., None, :]).flatten(2).sum(dim=2)
    counts = torch.ones(own.shape[1:], dtype=torch.int64, device=own.device)
    if routes.missing is not None:
        counts[routes.missing] = 0
    both = torch.stack([ids, own], dim=1).flatten(2).long()
    loads = torch.zeros(len(labels), 2, num_experts, dtype=torch.int64, device=own.device)
    loads.scatter_add_(2, both, counts.flatten().expand_as(both))
    return hits.to(narrow_dtype(num_experts + 1)), loads  # a count may be num_experts


def _error(
    misfit: Misfit, where: str, labels: list[int], routes: RoutedExperts, rows: Array, before: int
) -> MicroBatchError:
    """Return the error about rows of a micro-batch, of which `before` earlier ones lie in others."""
    expected = f"an overlap of {misfit.least:.2f} or more with the routers' own choice"
    cause = (
        "routes of another sample or micro-batch; rows in another order (TokenLayout's order=, side=), or "
        "layers (reversed, or labels that are moved by some); an engine that returned rows of an earlier "
        "request; other weights (optimizer steps since the rollout). "
        f"min_overlap= or {MIN_OVERLAP} sets what is expected, and 0 switches this check off"
    )
    if misfit.layers:
        named = ", ".join(str(labels[layer]) for layer in misfit.layers[:8])
        count = len(misfit.layers)
        more = ", ..." if len(misfit.layers) > 8 else ""
        place = f"all {count} layers" if count == len(labels) > 1 else f"layer {named}{more}"
    else:
        place = tokens_of(routes, rows, (misfit.first or 0) - before)
    if misfit.shift:
        expected = f"rows in their places: moved by {misfit.shift:+} they overlap by {misfit.there:.2f}"
        cause = f"a row too many or too few before these, from padding or from another prompt; {cause}"
    return MicroBatchError(
        "the routes are far from what the routers would choose for these tokens",
        where=f"{where}, {place}",
        expected=expected,
        got=f"{misfit.got:.2f}",
        cause=cause,
    )


def rows_by_token(routes: RoutedExperts) -> Array:
    """Return the rows that have a route, int64, in the order of their tokens."""
    if routes.placement.rows is None:
        return np.flatnonzero(routes.recorded.numpy())
    order: Array = np.argsort(routes.placement.rows.numpy(), kind="stable")
    rows: Array = order[routes.recorded.numpy()[order]]
    return rows


def starts_of(routes: RoutedExperts, rows: Array) -> Array:
    """Return at which of these rows, in the order of tokens, each sequence begins; one if none is known."""
    if routes.placement.rows is None:
        return np.zeros(1, np.int64)
    bounds = np.cumsum([0, *routes.placement.lengths])
    return np.unique(np.searchsorted(routes.placement.rows.numpy()[rows], bounds[:-1]))


def tokens_of(routes: RoutedExperts, rows: Array, at: int) -> str:
    """Return the name of the tokens of the 64 rows from `at` on."""
    first = int(rows[at])
    last = int(rows[at + RUN - 1])
    tokens = routes.placement.rows
    if tokens is None:
        return f"rows {first} to {last}"
    starts = np.cumsum([0, *routes.placement.lengths])
    first, last = int(tokens[first]), int(tokens[last])
    here = int(np.searchsorted(starts, first, side="right")) - 1  # the sequence of the first token
    there = int(np.searchsorted(starts, last, side="right")) - 1
    to = "" if here == there else f"sequence {there}, "
    return f"sequence {here}, tokens {first - starts[here]} to {to}{last - starts[there]}"
