"""replay: make every router choose what was recorded."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch

from npu_replay import environment
from npu_replay.errors import MicroBatchError, RouterError, list_of, micro_batch, one_of
from npu_replay.routers import Model, Router, check_losses, labels_of
from npu_replay.routes.arguments import StageLabels
from npu_replay.routes.inputs import Called, InputCheck, copied, parameter_names
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.sessions import seam
from npu_replay.sessions.block import to_enter
from npu_replay.sessions.device_routes import DeviceRoutes, to_device
from npu_replay.sessions.live_mismatch import LiveMismatch
from npu_replay.sessions.micro_batches import CALLED_INSIDE, Forward, Marks
from npu_replay.sessions.overlap import OverlapCheck
from npu_replay.sessions.router_calls import RouterCalls
from npu_replay.sessions.session import Session


def replay(
    model: Model,
    routes: Sequence[RoutedExperts],
    *,
    live_mismatch: bool = False,
    min_overlap: float | None = None,
    aux_loss: AuxLoss | None = None,
) -> Replay:
    """Make the routers of `model` choose the experts in `routes`.

    >>> with torch.no_grad(), npu_replay.record(model) as recording:
    ...     output = model(batch)
    >>> with npu_replay.replay(model, recording.routes, live_mismatch=True) as session:
    ...     model(batch).logits.mean().backward()
    >>> session.metrics()["rows"], session.metrics()["live_mismatch"]
    (24, 0.0)

    Args:
        model: the module that the training loop calls, or the list of virtual-pipeline chunks.
        routes: one RoutedExperts a micro-batch, in forward order; rows as the routers have them (Megatron:
            sequence-major; Hugging Face: batch-major). See TokenLayout for getting them there.
        live_mismatch: also count where the router would have chosen otherwise (costs its top-k).
        min_overlap: the share of the given experts, 0 to 1, that the routers have to choose by themselves,
            too, in each layer and in each 64 consecutive tokens of the first micro-batch. Below it, or where
            the rows fit better when they are moved, the routes are another sample's or lie in other rows: an
            error at the end of that micro-batch. Costs a top-k there. 0 checks nothing. Left out:
            NPU_REPLAY_MIN_OVERLAP, else a limit between chance, which is measured, and 1, for routes of a
            rollout engine alone. docs/bad-routes.md says what it sees.
        aux_loss: which experts the routers' aux losses count: "live", what the router would choose now, or
            "replayed"; the same on every Megatron-core. Left out: NPU_REPLAY_AUX_LOSS, else "live". The loss
            of transformers (output_router_logits) counts the live choice alone: "replayed" is refused.

    Raises:
        RouterError: on entering, if a router or its layer doesn't fit the routes, or is in another block.
        MicroBatchError: in the block and on leaving, if forwards and routes don't pair up, or the model is
            called with other tokens than those that the routes belong to.
        NoEffect: at the end of a forward, if a router didn't use them.
        RecomputeError: in backward, or on leaving, if a recompute can't have its own forward's.
        ReplayError: all of them; docs/errors.md says what rises where.
    """
    options = {"live_mismatch": live_mismatch, "min_overlap": min_overlap, "aux_loss": aux_loss}
    return to_enter(Replay(model, routes, **options))


AuxLoss: TypeAlias = Literal["live", "replayed"]


class AnyReplay(Session):
    """What all replays share: answering a router's top-k with routes of its chunk's micro-batch.

    Args:
        model: see Session.
        live_mismatch, min_overlap, aux_loss: see replay.
    """

    name = "replay"
    foreign = True

    def __init__(
        self,
        model: Model,
        *,
        live_mismatch: bool = False,
        min_overlap: float | None = None,
        aux_loss: AuxLoss | None = None,
    ) -> None:
        super().__init__(model)
        if aux_loss is not None:
            one_of(aux_loss, ("live", "replayed"), "aux_loss")
        self._aux_loss = environment.read(environment.AUX_LOSS, "live") if aux_loss is None else aux_loss
        self._mismatch = LiveMismatch(live_mismatch)
        self._overlap = OverlapCheck(min_overlap)
        self._given: dict[tuple[int, int], DeviceRoutes] = {}
        """Of each chunk and micro-batch."""
        self._compares = False

    def _routes_of(self, chunk: int, number: int) -> DeviceRoutes:
        given = self._given.get((chunk, number))
        if given is None:
            raise MicroBatchError(
                "no routes were given for this forward",
                where=f"{micro_batch(number)}, chunk {chunk}",
                expected="the routes of each forward before it",
                got="none",
                cause="an extra forward (a reference pass, an evaluation) while a replay is on",
            )
        return given

    def _send(self, forward: Forward, device: torch.device) -> None:
        """The copy of a micro-batch begins with the micro-batch before it, if its routes are here."""
        for number in (forward.number, forward.number + 1):
            if (given := self._given.get((forward.chunk, number))) is not None:
                given.send(device)

    def metrics(self) -> dict[str, float]:
        """Micro-batches, routers, seconds; live_mismatch where it was asked for; overlap where routes were
        held against the routers' own choice."""
        figures = super().metrics()
        counted = self.counts()
        if counted["compared"]:
            figures["live_mismatch"] = counted["differing"] / counted["compared"]
        if counted["given"]:
            figures["overlap"] = counted["shared"] / counted["given"]
        return figures

    def counts(self) -> dict[str, int]:
        """Also token-layers compared with the live router, and how many of them differed; experts that were
        judged, and how many of them the routers chose too."""
        found, overlap = self._mismatch, self._overlap
        figures = {"differing": int(found.differing), "compared": found.compared}
        return super().counts() | figures | {"shared": overlap.shared, "given": overlap.given}

    def _check_model(self) -> None:
        super()._check_model()
        losses = any(router.aux_losses is not None for router in self._all_routers())
        self._compares = losses and self._aux_loss == "live"

    def _attach_router(self, router: Router, chunk: int, marks: Marks) -> None:
        super()._attach_router(router, chunk, marks)
        losses = router.aux_losses
        if losses is not None and losses.follow != (self._aux_loss == "replayed"):
            counted = functools.partial(_counted, weakref.ref(self._calls[-1]), self._aux_loss)
            self._undo.callback(losses.recount(counted).remove)

    def _compare(self, call: seam.Call) -> None:
        """Find the router's own choice too, if its aux losses count that in this call."""
        router = call.owner.router
        if (losses := router.aux_losses) is not None and losses.follow_the_call_of(router.module):
            call.own()

    def _choose_again(self, call: seam.Call) -> torch.Tensor:
        if self._compares:
            self._compare(call)
        return super()._choose_again(call)

    def labels(self, chunk: int) -> StageLabels:
        """The decoder layers of a chunk's routers, ascending."""
        return labels_of(self._routers[chunk], self._all_routers())

    def _check_layers(self, number: int, routes: RoutedExperts, routers: Sequence[Router]) -> None:
        """Refuse routes that these routers can't be given."""
        named = labels_of(routers, self._all_routers()).among(routes.layers, micro_batch(number))
        for router, label in zip(routers, named, strict=True):
            where = micro_batch(number, router.label)
            if label not in routes.layers:
                raise RouterError(
                    "this decoder layer of the model is missing from the routes",
                    where=where,
                    expected=f"layers {[router.label for router in routers]}",
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
            if None not in (router.row_order, routes.row_order) and router.row_order != routes.row_order:
                raise RouterError(
                    "the routes were laid out in another order of rows than the model's",
                    where=where,
                    expected=f"TokenLayout with order={router.row_order!r}",
                    got=f"order={routes.row_order!r}",
                    cause="order= left at Megatron's, sequence-major, for a model of transformers, which is "
                    "batch-major",
                )

    def _prepare(
        self, router: Router, forward: Forward, rows: int, device: torch.device
    ) -> tuple[DeviceRoutes, torch.Tensor, torch.Tensor | None, dict[int, Any]]:
        """The routes of the micro-batch, and what of them is on the device."""
        if forward is self._timeline.bypassed:
            self._check_forward(forward)
        given = self._routes_of(forward.chunk, forward.number)
        if given.rows != rows:
            raise MicroBatchError(
                "the routes have another number of tokens than the router",
                where=micro_batch(forward.number, router.label),
                expected=f"{rows} rows",
                got=f"{given.rows} in the routes",
                cause=self._why_other_rows(forward),
            )
        if device not in given.on:
            self._send(forward, device)
        return given, *given.on[device]

    def _choose(self, call: seam.Call) -> torch.Tensor:
        routes, narrow, missing, given = call.routes
        forward, label = call.forward, call.owner.label
        ids, call.handed = given[label]
        chosen: torch.Tensor = ids.long()
        if call.handed is not None and call.handed._version:  # by a forward that raised
            call.handed = chosen.clone()
        if self._compares:
            self._compare(call)
        if self._mismatch.on:
            self._mismatch.add(chosen, call.own(), missing)
        if self._overlap.asks(forward, routes.routes):
            self._overlap.add(label, call.owner.router.num_experts, chosen, call.own(), missing)
        if missing is not None:  # never in place: layers may share their storage
            chosen, call.handed = chosen.index_copy(0, missing, call.own(missing)), None
        if (key := (label, forward.number)) in self._pending:
            column = narrow[:, routes.columns[label]]
            self._kept[key] = column if missing is None else chosen.to(call.owner.narrow)
        return chosen

    def _begin(self, chunk: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Forward:
        self._mismatch.end(complete=False)  # one that was interrupted, or whose end raised
        self._overlap.check(chunk, None, None)
        forward, module = super()._begin(chunk, args, kwargs), self._chunks[chunk]
        if self._aux_loss == "replayed":
            check_losses(module, dict(zip(parameter_names(module), args, strict=False)) | kwargs)
        if (given := self._given.get((chunk, forward.number))) is not None:
            for device in given.on:
                self._send(forward, device)
        return forward

    def _end(self, chunk: int, output: object) -> tuple[Forward, bool] | None:
        ended = super()._end(chunk, output)
        number = ended[0].number if ended is not None and ended[1] else None
        given = None if number is None else self._given.get((chunk, number))
        if given is not None:
            given.on.clear()  # what a recompute needs is kept by itself
        self._mismatch.end(complete=number is not None)
        self._overlap.check(chunk, number, given)
        return ended

    def _why_other_rows(self, forward: Forward) -> str:
        if forward is self._timeline.bypassed:
            return CALLED_INSIDE
        laid_out = (
            "padding, packing, sequence or context parallelism that the routes were not laid out for "
            "(TokenLayout does that)"
        )
        extra = "an evaluation or a reference pass inside the block, which belongs outside"
        if not self._chunks[forward.chunk].training:
            return f"{extra} (the model is in eval mode); or {laid_out}"
        if self._timeline.had_grad and not forward.grad:
            return (
                f"{extra} (this forward runs without grad, earlier ones of the block had it); or {laid_out}"
            )
        return f"{laid_out}; or {extra}"

    def _again(self, router: Router, number: int, device: torch.device) -> torch.Tensor:
        given = self._routes_of(self._chunk_of[router.label], number)
        if (router.label, number) in self._kept or given.missing is not None:
            return super()._again(router, number, device)
        return to_device(given.routes.layer_ids(router.label), device)

    def _clear(self) -> None:
        super()._clear()
        self._given.clear()


def _counted(calls: weakref.ref[RouterCalls], aux_loss: AuxLoss) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The ids that the aux losses of the router's call are told to count, and those that are used."""
    owner = calls()
    call = None if owner is None else seam.running(owner)
    if call is None or call.ids is None:
        return None
    counted = call.ids if aux_loss == "replayed" else call.own_ids
    return None if counted is None else (counted, call.ids)


class Replay(AnyReplay):
    """Makes every router choose what `routes` says.

    Args:
        model: see Session.
        routes: one RoutedExperts a micro-batch, in forward order; rows as the routers have them. Columns
            are picked by layer label, others are ignored. A row without a route takes the router's own
            choice.
        options: see AnyReplay.
    """

    def __init__(self, model: Model, routes: Sequence[RoutedExperts], **options: Any) -> None:
        super().__init__(model, **options)
        self._routes = checked_routes(routes)
        self._inputs = InputCheck(self._routes)

    def _holds(self) -> str:
        rows, missing = _rows(self._routes)
        count = f"{self._done()} of {len(self._routes)} micro-batches"
        return f"{count}, {rows} rows, {missing} without a route"

    def metrics(self) -> dict[str, float]:
        """Micro-batches, those whose tokens were compared with their routes', rows, rows without a route,
        samples with bad routes, seconds; live_mismatch where it was asked for; capacity_dropped where tokens
        are dropped."""
        done = self._routes[: self._done()]
        rows, missing = _rows(done)
        bad = sum(routes.bad_samples for routes in done)
        figures = {"rows": rows, "rows_without_route": missing, "bad_samples": bad}
        return super().metrics() | figures | {"tokens_compared": self._inputs.compared}

    def _check_model(self) -> None:
        super()._check_model()
        for number, routes in enumerate(self._routes):
            self._check_layers(number, routes, self._all_routers())
            for chunk in range(len(self._chunks)):
                self._given[chunk, number] = DeviceRoutes(routes, self.labels(chunk))

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

    def _tokens_wanted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called | None:
        known = self._inputs.known[self._timeline.number(0)] is not None
        return copied(args, kwargs, self._chunks[0]) if known else None

    def _check_inputs(self) -> None:
        """Were the micro-batches so far called with the tokens and images that their routes belong to?"""
        for number in [one for one in sorted(self._tokens) if one < self._timeline.ended[0]]:
            self._inputs.check(number, self._tokens.pop(number))

    def _end(self, chunk: int, output: object) -> tuple[Forward, bool] | None:
        ended = super()._end(chunk, output)
        if self._is_checked(self._timeline.ended[0] - 1):
            self._check_inputs()
        return ended

    def _check_complete(self) -> None:
        super()._check_complete()
        self._check_inputs()
        self._inputs.warn(self._chunks)
        done = self._timeline.ended[0]
        if done < len(self._routes):
            raise MicroBatchError(
                "there were fewer micro-batches than routes",
                where=micro_batch(done),
                expected=f"{len(self._routes)} forwards in this block",
                got=done,
                cause="a schedule that was cut short, a forward that raised and was skipped (what came after "
                "it then had the routes before its own), routes of more than this rank's micro-batches, or "
                "an evaluation inside the record block",
            )


def _rows(routes: Sequence[RoutedExperts]) -> tuple[int, int]:
    """How many rows there are, and how many of them without a route."""
    return sum(map(len, routes)), sum(int((~one.recorded).sum()) for one in routes)


def checked_routes(routes: Any) -> list[RoutedExperts]:
    """A list of RoutedExperts, or an error that says what it is instead."""
    listed = list_of(routes, RoutedExperts, "routes", "recording.routes was meant", kind=MicroBatchError)
    problem, expected = "there are no routes to replay", "one RoutedExperts a micro-batch"
    MicroBatchError.unless(bool(listed), problem, expected, "an empty list")
    return listed
