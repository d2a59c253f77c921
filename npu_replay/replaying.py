"""replay: make every router choose what was recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch

from npu_replay import seam
from npu_replay.errors import MicroBatchError, RouterError, micro_batch
from npu_replay.routed_experts import RoutedExperts
from npu_replay.routers import Model, Router
from npu_replay.session import Session, narrowed
from npu_replay.timeline import Forward

Staged: TypeAlias = "tuple[dict[int, torch.Tensor], torch.Tensor | None]"
"""One micro-batch on the device: narrow ids [rows, topk] by layer, and the rows without a route, if any."""


def replay(model: Model, routes: Sequence[RoutedExperts], *, live_mismatch: bool = False) -> Replay:
    """Make the routers of `model` choose the experts in `routes`.

        with npu_replay.replay(model, recording.routes) as session:
            forward_backward_func(...)
        session.metrics()

    Args:
        model: the module that the training loop calls, or the list of virtual-pipeline chunks.
        routes: one RoutedExperts a micro-batch, in forward order; rows as the routers have them (Megatron:
            sequence-major; Hugging Face: batch-major). See TokenLayout for getting them there.
        live_mismatch: also count where the router would have chosen otherwise (costs its top-k).

    Raises:
        ReplayError: see docs/errors.md for what rises where.
    """
    return Replay(model, routes, live_mismatch=live_mismatch)


class Replay(Session):
    """Makes every router choose what `routes` says.

    Args:
        model: see Session.
        routes: one RoutedExperts a micro-batch, in forward order; rows as the routers have them. Columns
            are picked by layer label, others are ignored. A row without a route takes the router's own
            choice.
        live_mismatch: also count where the router would have chosen otherwise. Costs its top-k.
    """

    name = "replay"
    foreign = True

    def __init__(self, model: Model, routes: Sequence[RoutedExperts], *, live_mismatch: bool = False) -> None:
        super().__init__(model)
        self._routes = checked_routes(routes)
        self._missing = [_rows_without_route(one) for one in self._routes]
        self._staged: dict[int, Staged] = {}
        self._live_mismatch = live_mismatch
        self._differing: torch.Tensor | int = 0
        self._compared = 0

    def metrics(self) -> dict[str, float]:
        """Micro-batches, rows, rows without a route, seconds; live_mismatch where it was asked for."""
        done = self._routes[: max(self._timeline.ended, default=0)]
        figures = super().metrics() | {
            "rows": sum(len(routes) for routes in done),
            "rows_without_route": sum(int((~routes.recorded).sum()) for routes in done),
        }
        if self._compared:
            figures["live_mismatch"] = float(self._differing) / self._compared
        return figures

    def _check_model(self) -> None:
        for number, routes in enumerate(self._routes):
            for router in self._all_routers():
                where = micro_batch(number, router.label)
                if router.label not in routes.layers:
                    raise RouterError(
                        "this decoder layer of the model is missing from the routes",
                        where=where,
                        expected=f"layers {[router.label for router in self._all_routers()]}",
                        got=list(routes.layers),
                        cause="routes of another pipeline stage, or counted over the MoE layers only where "
                        "the model has dense layers too",
                    )
                for what, ours, theirs in (
                    ("top-k", router.topk, routes.topk),
                    ("number of experts", router.num_experts, routes.num_experts),
                ):
                    if ours != theirs:
                        raise RouterError(
                            f"the routes have another {what} than the model",
                            where=where,
                            expected=ours,
                            got=theirs,
                            cause="rollout engine and trainer run different models or configs",
                        )

    def _check_forward(self, forward: Forward) -> None:
        if forward.number >= len(self._routes):
            raise MicroBatchError(
                "there are more micro-batches than routes",
                where=micro_batch(forward.number),
                expected=f"{len(self._routes)} forwards in this block",
                got=f"a forward number {forward.number + 1}",
                cause="the update cuts the batch into other micro-batches than the routes were laid out for, "
                "or an extra forward (a reference pass, an evaluation) runs inside the block",
            )

    def _is_checked(self, number: int) -> bool:
        return super()._is_checked(number) or number == len(self._routes) - 1

    def _live(self, router: Router, forward: Forward, rows: int, device: torch.device) -> seam.Choose:
        self._check_forward(forward)
        routes = self._routes[forward.number]
        if len(routes) != rows:
            raise MicroBatchError(
                "the routes have another number of tokens than the router",
                where=micro_batch(forward.number, router.label),
                expected=f"{rows} rows",
                got=len(routes),
                cause="padding, packing, sequence or context parallelism that the routes were not laid out "
                "for (TokenLayout does that)",
            )
        layers, missing = self._stage(forward.number, device)
        ids = layers[router.label]
        key = router.label, forward.number

        def choose(own: seam.Own) -> torch.Tensor:
            chosen = ids.long()
            if self._live_mismatch:
                self._count_differing(chosen, own(), routes, missing)
            if missing is not None:
                chosen.index_copy_(0, missing, own(missing))
                if forward.grad or key in self._pending:
                    self._kept[key] = narrowed(chosen, router)
            elif key in self._pending:
                self._kept[key] = ids
            return chosen

        return choose

    def _stage(self, number: int, device: torch.device) -> Staged:
        """One micro-batch on the device; its copy began with the micro-batch before it."""
        if number not in self._staged:
            self._staged[number] = self._sent(number, device)
        ahead = number + 1
        if ahead < len(self._routes) and ahead not in self._staged:
            self._staged[ahead] = self._sent(ahead, device)
        return self._staged[number]

    def _sent(self, number: int, device: torch.device) -> Staged:
        """Send the layers of this model to the device, narrow, without waiting for them."""
        labels = sorted(router.label for router in self._all_routers())
        ids = _to(device, self._routes[number].only(labels).ids)
        missing = self._missing[number]
        return dict(zip(labels, ids.unbind(1), strict=True)), None if missing is None else _to(
            device, missing
        )

    def _end(self, chunk: int, output: object) -> None:
        super()._end(chunk, output)
        done = min(self._timeline.ended)
        for number in [n for n in self._staged if n < done]:
            del self._staged[number]  # what a recompute needs is kept by itself

    def _again(self, router: Router, number: int, device: torch.device) -> torch.Tensor:
        if (router.label, number) in self._kept or self._missing[number] is not None:
            return super()._again(router, number, device)
        return _to(device, self._routes[number].layer_ids(router.label))

    def _clear(self) -> None:
        super()._clear()
        self._staged.clear()

    def _count_differing(
        self, theirs: torch.Tensor, ours: torch.Tensor, routes: RoutedExperts, missing: torch.Tensor | None
    ) -> None:
        differ = (theirs.sort(dim=1).values != ours.sort(dim=1).values).any(dim=1)
        if missing is not None:
            differ[missing] = False
        self._differing += differ.sum()
        self._compared += int(routes.recorded.sum())

    def _check_complete(self) -> None:
        super()._check_complete()
        done = self._timeline.ended[0]
        if done < len(self._routes):
            raise MicroBatchError(
                "there were fewer micro-batches than routes",
                where=micro_batch(done),
                expected=f"{len(self._routes)} forwards in this block",
                got=done,
                cause="a schedule that was cut short, a forward that raised and was skipped (what came after "
                "it then had the routes before its own), or routes of more than this rank's micro-batches",
            )


def _to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the device that the host doesn't wait for, which only pinned memory allows."""
    if device.type == "cpu":
        return tensor
    try:
        pinned = tensor.contiguous().pin_memory()
    except (RuntimeError, NotImplementedError):  # a device without such memory, or no more of it
        return tensor.to(device)
    return pinned.to(device, non_blocking=True)


def _rows_without_route(routes: RoutedExperts) -> torch.Tensor | None:
    missing = (~routes.recorded).nonzero()[:, 0]
    return missing if len(missing) else None


def checked_routes(routes: Sequence[RoutedExperts]) -> list[RoutedExperts]:
    """A list of RoutedExperts, or an error that says what it is instead."""
    if isinstance(routes, RoutedExperts):
        raise MicroBatchError(
            "replay takes a list",
            expected="one RoutedExperts a micro-batch",
            got="a single RoutedExperts",
            cause="[routes] was meant",
        )
    if not isinstance(routes, Iterable):
        raise MicroBatchError(
            "replay takes a list",
            expected="one RoutedExperts a micro-batch",
            got=type(routes),
            cause="recording.routes was meant",
        )
    listed = list(routes)
    for number, one in enumerate(listed):
        if not isinstance(one, RoutedExperts):
            raise MicroBatchError(
                "this isn't RoutedExperts", where=micro_batch(number), expected="RoutedExperts", got=type(one)
            )
    if not listed:
        raise MicroBatchError(
            "there are no routes to replay", expected="one RoutedExperts a micro-batch", got="an empty list"
        )
    return listed
