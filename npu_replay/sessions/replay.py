"""replay: make every router choose what was recorded."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import torch

from npu_replay.errors import MicroBatchError, ReplayError, RouterError, list_of, micro_batch, share
from npu_replay.routers import Model, Router
from npu_replay.routes.inputs import copied
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.sessions import seam
from npu_replay.sessions.micro_batches import CALLED_INSIDE, Forward
from npu_replay.sessions.session import Session, narrowed
from npu_replay.sessions.staging import Packet, Staged, to_device
from npu_replay.sessions.witness import Count


def replay(
    model: Model,
    routes: Sequence[RoutedExperts],
    *,
    live_mismatch: bool = False,
    max_live_mismatch: float | None = None,
    aux_loss: AuxLoss | None = None,
) -> Replay:
    """Make the routers of `model` choose the experts in `routes`.

        with npu_replay.replay(model, recording.routes) as session:
            forward_backward_func(...)
        session.metrics()

    Args:
        model: the module that the training loop calls, or the list of virtual-pipeline chunks.
        routes: one RoutedExperts a micro-batch, in forward order; rows as the routers have them (Megatron:
            sequence-major; Hugging Face: batch-major). See TokenLayout for getting them there.
        live_mismatch: also count where the router would have chosen otherwise (costs its top-k).
        max_live_mismatch: the share of token-layers, 0 to 1, up to which the first micro-batch's routes may
            differ from the router's own choice. Above it they are another batch's, or lie in other rows than
            the tokens: an error at the end of that micro-batch. Costs a top-k there alone.
        aux_loss: which experts the routers' aux losses count: "live", what the router would choose now, or
            "replayed"; the same on every Megatron-core. Left out: NPU_REPLAY_AUX_LOSS, else "live".

    Raises:
        ReplayError: see docs/errors.md for what rises where.
    """
    return Replay(
        model, routes, live_mismatch=live_mismatch, max_live_mismatch=max_live_mismatch, aux_loss=aux_loss
    )


AuxLoss: TypeAlias = Literal["live", "replayed"]


def counted_by_aux_losses(asked: str | None = None) -> AuxLoss:
    """Which experts aux losses count in a replay: as asked for, or as NPU_REPLAY_AUX_LOSS says, else "live".

    Raises:
        ReplayError: neither "live" nor "replayed".
    """
    found = asked or os.environ.get("NPU_REPLAY_AUX_LOSS") or "live"
    if found == "live":
        return "live"
    if found == "replayed":
        return "replayed"
    raise ReplayError(
        "this is nothing that aux losses can count",
        where="aux_loss" if asked else "NPU_REPLAY_AUX_LOSS",
        expected="'live' or 'replayed'",
        got=found,
    )


class Replaying(Session):
    """What all replays share: answering a router's top-k out of packets of routes.

    Args:
        model: see Session.
        live_mismatch, max_live_mismatch, aux_loss: see replay.
    """

    name = "replay"
    foreign = True

    def __init__(
        self,
        model: Model,
        *,
        live_mismatch: bool = False,
        max_live_mismatch: float | None = None,
        aux_loss: AuxLoss | None = None,
    ) -> None:
        super().__init__(model)
        self._aux_loss = counted_by_aux_losses(aux_loss)
        self._live_mismatch = live_mismatch
        self._most: float | None = None
        if max_live_mismatch is not None:
            self._most = share(max_live_mismatch, "max_live_mismatch", "token-layers")
        self._apart = Apart()
        self._first: dict[int, Apart] = {}
        """By chunk, in its first forward."""
        self._chunk_of: dict[int, int] = {}

    def _packet(self, chunk: int, number: int) -> Packet:
        """The routes of a chunk's micro-batch, which has some."""
        raise NotImplementedError

    def _stage(self, chunk: int, number: int, device: torch.device) -> Staged:
        """The same on the device."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Micro-batches, routers, seconds; live_mismatch where it was asked for."""
        figures = super().metrics()
        counted = self.counts()
        if counted["compared"]:
            figures["live_mismatch"] = counted["differing"] / counted["compared"]
        return figures

    def counts(self) -> dict[str, int]:
        """Also token-layers compared with the live router, and how many of them differed."""
        return super().counts() | {"differing": int(self._apart.differing), "compared": self._apart.compared}

    def _check_model(self) -> None:
        self._chunk_of = {
            router.label: chunk for chunk, routers in enumerate(self._routers) for router in routers
        }

    def _attach(self) -> None:
        super()._attach()
        for router in self._all_routers():
            losses = router.aux_losses
            if losses is not None and losses.follow != (self._aux_loss == "replayed"):
                self._handles.append(losses.recount(functools.partial(self._counted, router)))

    def _counted(self, router: Router) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The ids that the aux losses of the router's call are told to count, and those that are used."""
        running = self._calls.stack[-1] if self._calls.stack else None
        if running is None or running.module is not router.module:
            return None
        used = running.call.ids
        counted = used if self._aux_loss == "replayed" else running.call.own_ids
        return None if counted is None or used is None else (counted, used)

    def _compares(self, router: Router) -> bool:
        losses = router.aux_losses
        return losses is not None and self._aux_loss == "live" and losses.follow_the_call_of(router.module)

    def _check_layers(self, number: int, routes: RoutedExperts, routers: Sequence[Router]) -> None:
        """Refuse routes that these routers can't be given."""
        for router in routers:
            where = micro_batch(number, router.label)
            if router.label not in routes.layers:
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

    def _live(self, router: Router, forward: Forward, rows: int, device: torch.device) -> seam.Choose:
        self._check_forward(forward)
        routes = self._packet(forward.chunk, forward.number).routes
        if len(routes) != rows:
            raise MicroBatchError(
                "the routes have another number of tokens than the router",
                where=micro_batch(forward.number, router.label),
                expected=f"{rows} rows",
                got=len(routes),
                cause=self._why_other_rows(forward),
            )
        layers, missing = self._stage(forward.chunk, forward.number, device)
        ids = layers[router.label]
        key = router.label, forward.number

        def choose(own: seam.Own) -> torch.Tensor:
            chosen = ids.long()
            tallies = self._tallies(forward)
            if tallies:
                differ = _differ(chosen, own(), missing)
                for tally in tallies:
                    tally.add(differ, int(routes.recorded.sum()))
            if missing is not None:
                chosen.index_copy_(0, missing, own(missing))
                if key in self._pending:
                    self._kept[key] = narrowed(chosen, router)
            elif key in self._pending:
                self._kept[key] = ids
            return chosen

        return choose

    def _end(self, chunk: int, output: object) -> None:
        super()._end(chunk, output)
        first = self._first.pop(chunk, None)
        if first is not None and self._most is not None and self._timeline.ended[chunk]:
            self._check_live_mismatch(chunk, first.share(), self._most)

    def _tallies(self, forward: Forward) -> list[Apart]:
        """Where this forward's distance from the live choice is counted."""
        asked = [self._apart] if self._live_mismatch else []
        if self._most is not None and forward.number == 0:
            asked.append(self._first.setdefault(forward.chunk, Apart()))
        return asked

    def _check_live_mismatch(self, chunk: int, found: float, most: float) -> None:
        """At the end of a chunk's first forward: are the routes anywhere near its routers' own choice?"""
        if found <= most:
            return
        raise MicroBatchError(
            "the routes are far from what the routers would choose for these tokens",
            where=f"{micro_batch(0)}, chunk {chunk}",
            expected=f"at most {most:.1%} of the token-layers to differ (max_live_mismatch, or in a verl "
            "job NPU_REPLAY_MAX_LIVE_MISMATCH)",
            got=f"{found:.1%}",
            cause="routes of another micro-batch or of other weights, rows in another order (TokenLayout's "
            "order=, side=), or a rollout in so low a precision that a higher ceiling is right",
        )

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
        packet = self._packet(self._chunk_of[router.label], number)
        if (router.label, number) in self._kept or packet.missing is not None:
            return super()._again(router, number, device)
        return to_device(packet.routes.layer_ids(router.label), device)


class Apart:
    """Token-layers with a route, and in how many of them the live router would have chosen otherwise."""

    def __init__(self) -> None:
        self.differing = Count()
        self.compared = 0

    def add(self, differ: torch.Tensor, compared: int) -> None:
        self.differing.add(differ)
        self.compared += compared

    def share(self) -> float:
        """Waits for the device."""
        return int(self.differing) / max(1, self.compared)


def _differ(theirs: torch.Tensor, ours: torch.Tensor, missing: torch.Tensor | None) -> torch.Tensor:
    """[rows] bool: where the sets of experts differ, but for rows without a route."""
    differ = (theirs.sort(dim=1).values != ours.sort(dim=1).values).any(dim=1)
    if missing is not None:
        differ[missing] = False
    return differ


class Replay(Replaying):
    """Makes every router choose what `routes` says.

    Args:
        model: see Session.
        routes: one RoutedExperts a micro-batch, in forward order; rows as the routers have them. Columns
            are picked by layer label, others are ignored. A row without a route takes the router's own
            choice.
        live_mismatch, max_live_mismatch, aux_loss: see replay.
    """

    def __init__(
        self,
        model: Model,
        routes: Sequence[RoutedExperts],
        *,
        live_mismatch: bool = False,
        max_live_mismatch: float | None = None,
        aux_loss: AuxLoss | None = None,
    ) -> None:
        super().__init__(
            model, live_mismatch=live_mismatch, max_live_mismatch=max_live_mismatch, aux_loss=aux_loss
        )
        self._packets = [Packet(one) for one in checked_routes(routes)]

    def _holds(self) -> str:
        routes = [packet.routes for packet in self._packets]
        rows, missing = sum(map(len, routes)), sum(int((~one.recorded).sum()) for one in routes)
        return f"{self._done()} of {len(routes)} micro-batches, {rows} rows, {missing} without a route"

    def metrics(self) -> dict[str, float]:
        """Micro-batches, rows, rows without a route, samples with bad routes, seconds; live_mismatch where it
        was asked for; capacity_dropped where tokens are dropped."""
        done = [packet.routes for packet in self._packets[: self._done()]]
        return super().metrics() | {
            "rows": sum(len(routes) for routes in done),
            "rows_without_route": sum(int((~routes.recorded).sum()) for routes in done),
            "bad_samples": sum(routes.bad_samples for routes in done),
        }

    def _packet(self, chunk: int, number: int) -> Packet:
        return self._packets[number]

    def _stage(self, chunk: int, number: int, device: torch.device) -> Staged:
        """The copy of a micro-batch begins with the micro-batch before it."""
        labels = sorted(self._chunk_of)
        here, *_ = [packet.staged(labels, device) for packet in self._packets[number : number + 2]]
        return here

    def _check_model(self) -> None:
        super()._check_model()
        for number, packet in enumerate(self._packets):
            self._check_layers(number, packet.routes, self._all_routers())

    def _check_forward(self, forward: Forward) -> None:
        if forward.number >= len(self._packets):
            raise MicroBatchError(
                "there are more micro-batches than routes",
                where=micro_batch(forward.number),
                expected=f"{len(self._packets)} forwards in this block",
                got=f"a forward number {forward.number + 1}",
                cause="the update cuts the batch into other micro-batches than the routes were laid out for, "
                "or an extra forward (a reference pass, an evaluation) runs inside the block",
            )

    def _is_checked(self, number: int) -> bool:
        return super()._is_checked(number) or number == len(self._packets) - 1

    def _tokens_wanted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        known = self._packets[self._timeline.number(0)].routes.inputs is not None
        return copied(args, kwargs) if known else None

    def _check_inputs(self) -> None:
        """Were the micro-batches so far called with the tokens that their routes belong to?"""
        for number in [one for one in sorted(self._tokens) if one < self._timeline.ended[0]]:
            tokens = self._tokens.pop(number).cpu()
            inputs = self._packets[number].routes.inputs
            if inputs is None or inputs.fit(tokens):
                continue
            others = [n for n, packet in enumerate(self._packets) if _belong(packet.routes, tokens)]
            raise MicroBatchError(
                "the model was called with other tokens than those that the routes belong to",
                where=micro_batch(number),
                expected="the tokens of the record, or of the layout's fingerprints, in their places",
                got=f"those of the routes of {micro_batch(others[0])}" if others else "others",
                cause="micro-batches in another order than their routes (a shuffle, dynamic batches), "
                "padding on another side, to another length or with other ids, or fingerprints of more "
                "tokens than the model is fed. record(inputs=False), or a layout without fingerprints, "
                "checks none",
            )

    def _end(self, chunk: int, output: object) -> None:
        super()._end(chunk, output)
        if self._is_checked(self._timeline.ended[0] - 1):
            self._check_inputs()
        for packet in self._packets[: min(self._timeline.ended)]:
            packet.unstage()

    def _clear(self) -> None:
        super()._clear()
        for packet in self._packets:
            packet.unstage()

    def _check_complete(self) -> None:
        super()._check_complete()
        self._check_inputs()
        done = self._timeline.ended[0]
        if done < len(self._packets):
            raise MicroBatchError(
                "there were fewer micro-batches than routes",
                where=micro_batch(done),
                expected=f"{len(self._packets)} forwards in this block",
                got=done,
                cause="a schedule that was cut short, a forward that raised and was skipped (what came after "
                "it then had the routes before its own), routes of more than this rank's micro-batches, or "
                "an evaluation inside the record block",
            )


def _belong(routes: RoutedExperts, tokens: torch.Tensor) -> bool:
    return routes.inputs is not None and routes.inputs.fit(tokens)


def checked_routes(routes: Sequence[RoutedExperts]) -> list[RoutedExperts]:
    """A list of RoutedExperts, or an error that says what it is instead."""
    listed = list_of(routes, RoutedExperts, "routes", "recording.routes was meant", kind=MicroBatchError)
    if not listed:
        raise MicroBatchError(
            "there are no routes to replay", expected="one RoutedExperts a micro-batch", got="an empty list"
        )
    return listed
