"""replay: make every router choose the experts of given routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from npu_replay.errors import EXTRA, RECUT, MicroBatchError, likeliest, list_of, micro_batch, whole_number
from npu_replay.routers import Model, labels_of
from npu_replay.routes.input_check import InputCheck
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.sessions.answering import Answering
from npu_replay.sessions.micro_batch import MicroBatch, is_due, place_of
from npu_replay.sessions.own_choice import AuxLoss, OwnChoice
from npu_replay.sessions.route_source import DeviceRoutes, RouteSource, check_fit, row_order_of
from npu_replay.sessions.session import Session, to_enter


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
            sequence-major; Hugging Face: batch-major). TokenLayout brings them into this order.
        live_mismatch: also count where the router would have chosen otherwise (costs its top-k).
        min_overlap: the least share of the given experts, 0 to 1, that the routers must choose by
            themselves, in each layer and in each 64 consecutive tokens of micro-batches 0, 1, 2, 4, 8, ...
            and the last. Routes below it, or that fit better when moved, belong to another sample or lie in
            other rows: an error at the end of that micro-batch. Costs a top-k there. 0 checks nothing. Left
            out: NPU_REPLAY_MIN_OVERLAP, else a limit between measured chance and 1, for routes of a rollout
            engine; of other routes whose tokens are unknown, one WARNING says that they are far off.
            docs/layout.md says what it detects.
        aux_loss: which experts the routers' aux losses count: "live", what the router would choose now, or
            "replayed"; the same on every Megatron-core. Left out: NPU_REPLAY_AUX_LOSS, else "live". The
            loss of transformers (output_router_logits) counts the live choice: it refuses "replayed".

    Raises:
        RouterError: on entering, if a router or its layer doesn't fit the routes, or is in another block.
        MicroBatchError: in the block and on leaving, if forwards and routes don't pair up, or the model is
            called with other tokens than those of the routes.
        NoEffect: at the end of a forward, if a router didn't use them.
        RecomputeError: in backward, or on leaving, if a recompute can't have the routes of its forward.
        ReplayError: the base of all of them; docs/errors.md lists each error.
    """
    own = OwnChoice(live_mismatch=live_mismatch, min_overlap=min_overlap, aux_loss=aux_loss)
    return to_enter(Replay(model, routes, own))


class Replay(Session):
    """Makes every router choose what `routes` says.

    Columns are picked by layer label. A row without a route takes the router's own choice.
    """

    name = "replay"

    def __init__(self, model: Model, routes: Sequence[RoutedExperts], own: OwnChoice) -> None:
        self._source = ListedRoutes(routes)
        self._own = own
        self._skipped: set[int] = set()  # micro-batches that don't run
        super().__init__(model, Answering(self._source, own))

    def skip(self, micro_batches: int | None = 1) -> None:
        """Pass over the routes of the next micro-batches, which the loop leaves out; None means all left.

            if diverged:
                session.skip()  # this micro-batch alone
            if kl > limit:
                session.skip(None)  # the update stops early

        The next forward gets the routes behind them. Call it between two forwards.

        Raises:
            MicroBatchError: in a forward, or with fewer micro-batches left.
        """
        ended = self.timeline.ended
        MicroBatchError.unless(
            len(set(ended)) == 1 and not any(map(self.timeline.running, range(len(ended)))),
            "skip() is called between two micro-batches",
            expected="an open block whose forwards have ended",
            got=f"{self}",
        )
        left = len(self._source.routes) - self.done
        count = left if micro_batches is None else whole_number(micro_batches, "micro_batches", least=0)
        MicroBatchError.unless(
            count <= left,
            "there are fewer micro-batches left than are skipped",
            expected=f"at most {left}",
            got=count,
            where=micro_batch(self.done),
        )
        self._skipped.update(range(self.done, self.done + count))
        ended[:] = [number + count for number in ended]

    def _finish(self) -> None:
        if self.done > len(self._skipped):
            self._source.called.warn(self.chunks, judged=self._own.has_judged)
            if self._source.called.compared:  # else the line above has said it
                self._own.warn_of_few_rows()

    def _progress(self) -> str:
        rows, missing = _rows(self._source.routes)
        count = f"{self.done} of {len(self._source.routes)} micro-batches"
        return f"{count}, {rows} rows, {missing} without a route"

    def metrics(self) -> dict[str, float]:
        """Return plain numbers for any tracker.

        These are micro-batches, rows, rows without a route, those of them that a TokenLayout made as padding,
        samples with bad routes, seconds; micro-batches whose routes' tokens were compared (tokens_compared);
        live_mismatch and overlap where measured; capacity_dropped where tokens are dropped.
        """
        done = [part for n, part in enumerate(self._source.routes[: self.done]) if n not in self._skipped]
        rows, missing = _rows(done)
        placements = [routes.placement for routes in done]
        padding = sum(int((placed.rows < 0).sum()) for placed in placements if placed.rows is not None)
        figures = {"rows": rows, "rows_without_route": missing, "padding": padding}
        figures["bad_samples"] = sum(placed.bad_samples for placed in placements)
        figures |= {"micro_batches": len(done), "tokens_compared": self._source.called.compared}
        return super().metrics() | figures


class ListedRoutes(RouteSource):
    """Holds the routes of all micro-batches, in forward order."""

    def __init__(self, routes: Any) -> None:
        super().__init__()
        self.routes = list_of(
            routes, RoutedExperts, "routes", "[routes] or recording.routes was meant", kind=MicroBatchError
        )
        MicroBatchError.unless(
            bool(self.routes),
            "there are no routes to replay",
            expected="one RoutedExperts a micro-batch",
            got="an empty list",
        )
        self.called = InputCheck(self.routes)

    def enters(self, session: Session) -> None:
        super().enters(session)
        for number, routes in enumerate(self.routes):
            check_fit(routes, self.all_routers, self.all_routers, micro_batch(number))
            for chunk, routers in enumerate(self.routers):
                self.given[chunk, number] = DeviceRoutes(routes, labels_of(routers, self.all_routers))

    def check_forward(self, forward: MicroBatch) -> None:
        if forward.number >= len(self.routes):
            epoch = "a second epoch over the same batch: a block each, or routes * 2 if no step lies between"
            left_open = "a block that was opened without `with` and never left: npu_replay.report() names it"
            raise MicroBatchError(
                "there are more micro-batches than routes",
                where=micro_batch(forward.number),
                expected=f"{len(self.routes)} forwards in this block",
                got=f"forward number {forward.number + 1}",
                cause=likeliest(RECUT, epoch, EXTRA, left_open),
            )

    def is_last(self, number: int) -> bool:
        return number == len(self.routes) - 1

    def wants_inputs_of(self, number: int) -> bool:
        # Without fingerprints only the padding can be compared, which is alike in all micro-batches.
        known = self.called.known[number] is not None
        return known and (self.called.tells_tokens(number) or is_due(number) or self.is_last(number))

    def knows_tokens(self, number: int) -> bool:
        return self.called.knows_tokens(number)

    def ends(self, forward: MicroBatch) -> None:
        last = self.timeline.ended[0] - 1
        if is_due(last) or self.is_last(last):
            self._check_inputs(wait=self.is_last(last))

    def check_complete(self) -> None:
        self._check_inputs(wait=True)
        done = self.timeline.ended[0]
        MicroBatchError.unless(
            done >= len(self.routes),
            "there were fewer micro-batches than routes",
            expected=f"{len(self.routes)} forwards in this block",
            got=done,
            cause=likeliest(
                "a loop that stopped early: session.skip(None) passes over the routes that are left",
                RECUT,
                "routes of more than this rank's micro-batches, or an evaluation inside the record block",
                "a forward that raised or was left out: what came after it had the routes before its own; "
                "session.skip() passes over one",
            ),
            where=micro_batch(done),
        )

    def _check_inputs(self, *, wait: bool) -> None:
        for number in [waiting for waiting in sorted(self.inputs) if waiting < self.timeline.ended[0]]:
            if not (wait or self.inputs[number].has_come()):
                return
            self.called.check(number, self.inputs.pop(number), row_order_of(self.all_routers))


def _rows(routes: Sequence[RoutedExperts]) -> tuple[int, int]:
    return sum(map(len, routes)), sum(int((~part.recorded).sum()) for part in routes)


class StepReplay(Session):
    """Replays routes that are given to each chunk just before its forward. `options` are those of OwnChoice.

    with StepReplay(chunks) as session:
        session.give(chunk, routes)
        chunks[chunk](...)
    """

    name = "replay"

    def __init__(self, model: Model, *, errors_wait: bool = False, **options: Any) -> None:
        self._source = SteppedRoutes()
        answering = Answering(self._source, OwnChoice(**options))
        super().__init__(model, answering, errors_wait=errors_wait)

    def give(self, chunk: int, routes: RoutedExperts) -> None:
        """Set or replace the routes of a chunk's next forward; RouterError if they don't fit its routers."""
        MicroBatchError.unless(
            0 <= chunk < len(self.routers),
            "routes for no chunk of this block",
            cause="a block that isn't open, or another model's chunk",
            where=f"chunk {chunk}",
        )
        self._source.give(chunk, self.timeline.ended[chunk], routes)

    @property
    def first_chunk(self) -> int:
        return next((chunk for chunk, routers in enumerate(self.routers) if routers), 0)

    def metrics(self) -> dict[str, float]:
        """Return micro-batches, rows of all chunks, rows without a route, seconds, and live_mismatch."""
        figures = {"rows": self._source.rows, "rows_without_route": self._source.rows_without_route}
        return super().metrics() | figures

    def counts(self) -> dict[str, int]:
        """Return also the number of replayed routers, and the bytes of their routes."""
        return super().counts() | {"replayed": len(self._source.replayed), "bytes": self._source.bytes}


class SteppedRoutes(RouteSource):
    """Holds the routes of each chunk's next forward, and counts the used ones."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = self.rows_without_route = self.bytes = 0
        self.replayed: set[int] = set()

    def check_forward(self, forward: MicroBatch) -> None:
        if self.routers[forward.chunk]:
            self.of(forward)

    def ends(self, forward: MicroBatch) -> None:
        if not forward.has_raised and (device_routes := self.given.get(forward.key)):
            self.rows += device_routes.rows
            self.bytes += device_routes.routes.ids.nbytes
            self.rows_without_route += 0 if device_routes.missing is None else len(device_routes.missing)
            self.replayed |= device_routes.columns.keys()

    def check_complete(self) -> None:
        left = [at for at in self.given if at[1] >= self.timeline.ended[at[0]]]
        if left:
            chunk, number = left[0]
            raise MicroBatchError(
                "routes were given for a forward that never came",
                where=place_of(number, chunk, len(self.routers)),
                cause="a schedule cut short",
            )
