"""Decide which routes each forward of a session gets, and copy them to the model's devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from npu_replay.errors import (
    EXTRA,
    LEFT_OUT,
    OTHER_ORDER,
    RECUT,
    MicroBatchError,
    RouterError,
    likeliest,
    micro_batch,
)
from npu_replay.routers import Router, labels_of
from npu_replay.routes.arguments import StageLabels
from npu_replay.routes.inputs import Called, find_other_order
from npu_replay.routes.routed_experts import RoutedExperts

if TYPE_CHECKING:
    from npu_replay.sessions.micro_batch import MicroBatch
    from npu_replay.sessions.session import Session

_FEW = 2**22
"""Up to this number of ids, a micro-batch is held as int64 on the device (32 MB)."""
_LAID_OUT = (
    "several sequences, padding, packing, sequence or context parallelism that the routes were not laid out "
    "for: TokenLayout.of_batch(input_ids, attention_mask), padded(...) or packed(...) lays the routes of all "
    "sequences out with gather([...])"
)
_RESPONSE = "the routes are of the response alone, and the model is called with its prompt, too"


class RouteSource:
    """Decides which routes each forward of a session gets. This base class has none: the routers choose.

    Args:
        keeps: the used ids of this many last forwards of each chunk are kept; None keeps all. Ids that a
            recompute may need are kept in any case.
        wants_inputs: keep token ids and images of each micro-batch.
    """

    why_other_rows = likeliest(RECUT, OTHER_ORDER, _LAID_OUT, _RESPONSE, LEFT_OUT, EXTRA)

    def __init__(self, *, keeps: int | None = 0, wants_inputs: bool = False) -> None:
        self.keeps = keeps
        self.records = keeps != 0  # keep the ids of the running forward in any case
        self._wants_inputs = wants_inputs
        self.inputs: dict[int, Called] = {}  # token ids and images of the first chunk's calls
        self.given: dict[tuple[int, int], DeviceRoutes] = {}  # by chunk and micro-batch

    @property
    def all_routers(self) -> list[Router]:
        return [router for routers in self.routers for router in routers]

    def enters(self, session: Session) -> None:
        """Enter a session, whose model and timeline are asked from now on; refuse routes that don't fit."""
        self.chunks = session.chunks
        self.routers = session.routers
        self.timeline = session.timeline

    def answers(self, router: Router) -> bool:
        return True

    def is_last(self, number: int) -> bool:
        return False

    def check_forward(self, forward: MicroBatch) -> None:
        """Refuse a micro-batch at its beginning."""

    def wants_inputs_of(self, number: int) -> bool:
        return self._wants_inputs

    def knows_tokens(self, number: int) -> bool:
        """Return whether the tokens of a micro-batch's routes are known, here or to whoever gives them."""
        return True

    def ends(self, forward: MicroBatch) -> None:
        """End a forward, which may have raised; it holds the ids that its routers used, if they are kept."""

    def check_complete(self) -> None:
        """Refuse routes that no forward has used."""

    def clear(self) -> None:
        self.given.clear()
        self.inputs.clear()

    def give(self, chunk: int, number: int, routes: RoutedExperts) -> None:
        """Set the routes of one micro-batch of a chunk; raise RouterError if they don't fit its routers."""
        here = self.routers[chunk]
        every = self.all_routers
        check_fit(routes, here, every, micro_batch(number))
        self.given[chunk, number] = DeviceRoutes(routes, labels_of(here, every))

    def of(self, forward: MicroBatch) -> DeviceRoutes:
        """Return the routes of a forward; raise MicroBatchError if there are none."""
        device_routes = self.given.get(forward.key)
        if device_routes is None:
            raise MicroBatchError(
                "no routes were given for this forward",
                where=forward.place,
                cause="an extra forward (a reference pass, an evaluation) while a replay is on",
            )
        return device_routes

    def fitting(self, router: Router, forward: MicroBatch, rows: int) -> DeviceRoutes:
        """Return the routes of a forward; raise MicroBatchError if a router's call has other rows."""
        device_routes = self.of(forward)
        if device_routes.rows != rows:
            raise MicroBatchError(
                "the routes have another number of tokens than the router",
                where=micro_batch(forward.number, router.label),
                expected=f"{rows} rows",
                got=f"{device_routes.rows} in the routes",
                cause=self.why_other_rows,
            )
        return device_routes

    def send(self, forward: MicroBatch, device: torch.device) -> None:
        """Start to copy the routes of this micro-batch and of the next one, as far as they are known."""
        for number in (forward.number, forward.number + 1):
            if (device_routes := self.given.get((forward.chunk, number))) is not None:
                device_routes.send(device)


class DeviceRoutes:
    """Holds the routes of one micro-batch for one chunk, and their copies on the model's devices."""

    def __init__(self, routes: RoutedExperts, labels: StageLabels) -> None:
        self.routes = routes
        self.rows = len(routes)
        self.columns = {label: column for column, label in enumerate(labels)}  # of the narrow ids
        self._of_all = routes.columns(labels)
        missing = (~routes.recorded).nonzero()[:, 0]
        self.missing: torch.Tensor | None = missing if len(missing) else None  # int64 rows without a route
        self.on: dict[torch.device, Given] = {}

    @property
    def ids(self) -> torch.Tensor:
        """Return the narrow ids on the host, [rows, layers, topk], a column for each router."""
        return self.routes.ids[:, self._of_all]

    def send(self, device: torch.device) -> None:
        if device in self.on or not self.columns:
            return
        narrow = to_device(self.ids, device)
        missing = None if self.missing is None else to_device(self.missing, device)
        ids = narrow.transpose(0, 1)
        wide = None
        if narrow.numel() <= _FEW and not torch.is_inference_mode_enabled():
            ids = wide = ids.to(torch.int64, memory_format=torch.contiguous_format)
        by_layer = dict(zip(self.columns, ids.unbind(), strict=True))
        lost = None
        if self.routes.shown is not None:
            dropped = (self.routes.shown < 0) & self.routes.recorded[:, None, None]
            lost = to_device(dropped[:, self._of_all], device)
        version = None if wide is None else wide._version
        self.on[device] = Given(self, narrow, missing, by_layer, wide, version, lost)


class Given(NamedTuple):
    """Holds the copies of one micro-batch's routes on one device.

    Few ids are cast to int64 together, since a cast for each layer costs more.

    Attributes:
        narrow: the ids, [rows, layers, topk].
        missing: the rows without a route, int64; None if each row has one.
        by_layer: the ids of each layer, [rows, topk]: a part of `wide`, or else of `narrow`.
        wide: the ids, int64 [layers, rows, topk], which the routers get; None if they are many.
        version: the version counter of `wide`, which its parts share.
        lost: the ids whose token was dropped over its expert's capacity, bool [rows, layers, topk]; None if
            the routes don't say.
    """

    routes: DeviceRoutes
    narrow: torch.Tensor
    missing: torch.Tensor | None
    by_layer: dict[int, torch.Tensor]
    wide: torch.Tensor | None
    version: int | None
    lost: torch.Tensor | None

    def lost_of(self, label: int) -> torch.Tensor | None:
        """Return which ids of a layer have lost their token, bool [rows, topk]; None if that isn't known."""
        return None if self.lost is None else self.lost[:, self.routes.columns[label]]

    def untouched(self) -> torch.Tensor | None:
        """Return which ids in `wide` are what they were, bool [layers, rows, topk]; None if all must be."""
        if self.wide is None or self.wide._version == self.version:
            return None
        return self.wide == self.narrow.transpose(0, 1)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a copy on the device; it goes through pinned memory, so that the host doesn't wait."""
    if device.type == "cpu":
        return tensor
    try:
        pinned = tensor.contiguous().pin_memory()
    except (RuntimeError, NotImplementedError):  # no pinned memory, or none left
        return tensor.to(device)
    return pinned.to(device, non_blocking=True)


def row_order_of(routers: Sequence[Router]) -> str | None:
    """Return the order of all these routers' rows; None if it isn't known, or differs."""
    orders = {router.row_order for router in routers}
    return orders.pop() if len(orders) == 1 else None


def check_fit(routes: RoutedExperts, routers: Sequence[Router], every: Sequence[Router], place: str) -> None:
    """Refuse routes that don't fit these routers; `every` holds all routers of this rank."""
    named = labels_of(routers, every).among(routes.layers, place)
    # A stage holds a part of the layers: only labels beyond the whole model's depth are sure to be wrong.
    depths = [other.depth for other in every if not other.whole]
    depth = max(*depths, *(other.label + 1 for other in every)) if any(depths) else 0
    model = f" of a model of {depth} decoder layers" if depth else ""
    for router, label in zip(routers, named, strict=True):
        order = find_other_order(router.row_order, routes.placement.row_order, None, None)
        if depth and routes.layers[-1:] >= (depth,):
            problem = "the routes are of a model with more decoder layers"
            expected = f"layers 0 to {depth - 1}{model}"
            got = f"layers up to {routes.layers[-1]}"
            cause = "rollout engine and trainer run different models, or this one was cut to some layers"
            if [label - 1 for label in routes.layers] == [other.label for other in every]:
                cause = "labels that count from 1: decoder layers are counted from 0"
        elif label not in routes.layers:
            problem = "this decoder layer of the model is missing from the routes"
            expected = f"layers {[other.label for other in routers]}{model}"
            got = f"{list(routes.layers)}"
            cause = likeliest(
                "routes of another model, with another number of layers",
                "routes of another pipeline stage",
                "labels that count the MoE layers alone",
            )
        elif (router.topk, router.num_experts) != (routes.topk, routes.num_experts):
            problem = "the routes have another top-k or number of experts than the model"
            expected = f"top-{router.topk} of {router.num_experts}"
            got = f"top-{routes.topk} of {routes.num_experts}"
            cause = "rollout engine and trainer run different models or configs"
        elif order is not None:
            raise order.error(RouterError, f"{place}, layer {router.label}")
        else:
            continue
        raise RouterError(
            problem, where=f"{place}, layer {router.label}", expected=expected, got=got, cause=cause
        )
