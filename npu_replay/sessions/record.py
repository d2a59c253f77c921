"""record and pin_recompute: every router chooses by itself, and its choice is kept."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from npu_replay.errors import MicroBatchError, ReplayError, RouterError, micro_batch
from npu_replay.routers import Model, Router
from npu_replay.routes.inputs import Inputs, is_grid
from npu_replay.routes.routed_experts import Placement, RoutedExperts, narrow_dtype, without_layers
from npu_replay.sessions.answering import Answering
from npu_replay.sessions.micro_batch import of_all_chunks
from npu_replay.sessions.route_source import RouteSource, row_order_of
from npu_replay.sessions.session import Session, to_enter


def record(model: Model, *, inputs: bool = True) -> Recording:
    """Record the experts that the routers of `model` choose.

        with npu_replay.record(model) as recording:
            forward_backward_func(..., forward_only=True)
        recording.routes  # one RoutedExperts a micro-batch

    Outputs and gradients stay bit-equal to an untouched run. A recompute takes the recorded ids.

    >>> with torch.no_grad(), npu_replay.record(model) as recording:
    ...     output = model(batch)
    >>> recording.routes
    [RoutedExperts(24 tokens, 2 layers, top-2 of 8, 0 rows without a route)]

    Args:
        model: the module that the training loop calls, or the list of virtual-pipeline chunks.
        inputs: keep with the routes the token ids of each call, and a digest of its images, videos and
            audio, so that a replay with another micro-batch's routes is refused. False for a model that
            gets other inputs in the update.

    Raises:
        ReplayError: on entering, if a router can't be recorded or is in another block; in the block, if a
            router's choice can't be seen; on leaving, if nothing ran or a recompute is still to come.
    """
    return to_enter(Recording(model, inputs=inputs))


class Recording(Session):
    """Keeps what every router chooses; `routes` holds it when the block has ended."""

    name = "record"

    def __init__(self, model: Model, *, inputs: bool = True) -> None:
        self._answering = Answering(RouteSource(keeps=None, wants_inputs=inputs))
        super().__init__(model, self._answering)
        self._routes: list[RoutedExperts] | None = None

    @property
    def routes(self) -> list[RoutedExperts]:
        """Return one RoutedExperts a micro-batch, in forward order; rows as the routers had them.

        Where experts drop tokens over their capacity, `replay` drops the same ones if it is given these
        routes themselves. Other rows made of them (`take`, a TokenLayout), bytes and files don't say which.
        """
        if self._routes is None:
            raise ReplayError(
                "the routes are complete when the record block has ended without an exception",
                expected="an ended block",
                got=self,
            )
        return self._routes

    def _finish(self) -> None:
        called = self._answering.shared.source.inputs
        order = row_order_of(self.all_routers)
        routes_of_all: list[RoutedExperts] = []
        for number in range(self.timeline.ended[0]):
            ids, lost = of_all_chunks(self._answering.kept, len(self.chunks), number)
            routes = micro_batch_routes(ids, self.all_routers, micro_batch(number), lost)
            inputs = mark = None
            if number in called:
                call = called[number].on_host()
                inputs = Inputs.recorded(call)
                # Images aren't in the fingerprint of the tokens alone.
                if call.single and not call.others and call.tokens.numel() == len(routes):
                    (mark,) = inputs.marks
            alike = inputs is not None and not is_grid(inputs.shape)  # both orders give the same rows
            placement = Placement(inputs=inputs, row_order=None if alike else order)
            routes_of_all.append(routes.with_known(placement=placement, fingerprint=mark))
        self._routes = routes_of_all
        self._results = f", routes of {sum(map(len, routes_of_all))} rows"


class StepRecording(Session):
    """Records routes that are taken chunk by chunk, right after each forward.

    with StepRecording(chunks) as session:
        chunks[chunk](...)
        routes = session.take(chunk)
    """

    name = "record"

    def __init__(self, model: Model, *, errors_wait: bool = False) -> None:
        # No inputs: frameworks check these themselves. One forward is kept, so that it can be taken.
        self._answering = Answering(RouteSource(keeps=1))
        super().__init__(model, self._answering, errors_wait=errors_wait)

    def take(self, chunk: int) -> RoutedExperts:
        MicroBatchError.unless(
            0 <= chunk < len(self.routers) and self.timeline.ended[chunk] > 0,
            "nothing was recorded yet",
            cause="a forward of another module than this chunk, or a block that isn't open",
            where=f"chunk {chunk}",
        )
        last = self._answering.kept.get((chunk, self.timeline.ended[chunk] - 1))
        if last is None:
            return without_layers()
        return micro_batch_routes(last.ids, self.routers[chunk], micro_batch(last.number), last.lost)


def micro_batch_routes(
    ids: Mapping[int, torch.Tensor],
    routers: list[Router],
    where: str,
    lost: Mapping[int, torch.Tensor],
    recorded: torch.Tensor | None = None,
) -> RoutedExperts:
    """Return the routes of one micro-batch from the ids of its calls, [rows, topk] each, by layer label.

    Args:
        lost: of calls that may drop tokens, the ids whose token was dropped, bool [rows, topk].
    """
    if not routers:
        return without_layers()
    routers = sorted(routers, key=lambda router: router.label)
    by_layer = {router.label: ids[router.label] for router in routers}
    rows = {label: len(layer_ids) for label, layer_ids in by_layer.items()}
    RouterError.unless(
        len({*rows.values()}) == 1,
        "the routers differ in rows",
        expected="the same number in each layer",
        got=rows,
        cause="pass the parts of the model to record() one by one",
        where=where,
    )
    on_one_device = len({layer_ids.device for layer_ids in by_layer.values()}) == 1
    stacked = torch.stack(
        [layer_ids if on_one_device else layer_ids.cpu() for layer_ids in by_layer.values()], dim=1
    )
    experts = routers[0].num_experts
    routes = RoutedExperts(
        ids=stacked.to(narrow_dtype(experts)).cpu(),
        layers=list(by_layer),
        num_experts=experts,
        recorded=recorded,
        constant_layers_ok=True,
        from_engine=False,
        copy=False,
    )
    gone = {label: lost[label].cpu() for label in by_layer if label in lost}
    if not gone:
        return routes
    shown = stacked.short().cpu()
    for column, label in enumerate(by_layer):
        if label in gone:
            shown[:, column].masked_fill_(gone[label], -1)
    return routes.with_known(shown=shown)


def pin_recompute(model: Model) -> Pinning:
    """Make activation recompute choose the experts that its own forward chose.

        with npu_replay.pin_recompute(model):
            train()

    Useful without RL, too: near ties flip in a recompute, and the gradients then belong to no forward.

    >>> with npu_replay.pin_recompute(model) as session:
    ...     model(batch).logits.mean().backward()
    >>> session.metrics()["micro_batches"], session.metrics()["routers"]
    (1, 2)

    Args:
        model: the module that the training loop calls, or the list of virtual-pipeline chunks.

    Raises:
        RouterError: on entering, if a router can't be replayed or is in another block.
        RecomputeError: in backward, if a recompute isn't of a forward of this block; on leaving, if one is
            still to come.
    """
    return to_enter(Pinning(model))


class Pinning(Session):
    """Makes every recompute choose what its own forward chose; the forwards choose freely."""

    name = "pin_recompute"

    def __init__(self, model: Model) -> None:
        super().__init__(model, Answering(RouteSource(), lasts=True))
