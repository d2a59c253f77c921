"""record: keep what every router chooses."""

from __future__ import annotations

from typing import Any

import torch

from npu_replay.errors import ReplayError, RouterError, micro_batch
from npu_replay.routers import Model, Router
from npu_replay.routes.inputs import Called, Inputs, copied
from npu_replay.routes.routed_experts import RoutedExperts, narrow_dtype, without_layers
from npu_replay.sessions import seam
from npu_replay.sessions.block import to_enter
from npu_replay.sessions.masks import address
from npu_replay.sessions.micro_batches import Forward
from npu_replay.sessions.recompute import Key
from npu_replay.sessions.router_calls import FEW
from npu_replay.sessions.session import Session


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
        inputs: keep with the routes which token ids the model was called with, and a digest of its images,
            videos and audio, so that a replay of another micro-batch's routes is refused. False for a model
            that is fed others in the update.

    Raises:
        ReplayError: on entering, if a router can't be recorded or is in another block; in the block, if a
            router's choice can't be seen; on leaving, if nothing ran or a recompute is still to come.
    """
    return to_enter(Recording(model, inputs=inputs))


class Recording(Session):
    """Keeps what every router chooses; `routes` holds it when the block has ended."""

    name = "record"

    def __init__(self, model: Model, *, inputs: bool = True) -> None:
        super().__init__(model)
        self._keeps_inputs = inputs
        self._ids: dict[Key, torch.Tensor] = {}
        self._wide: dict[Key, tuple[torch.Tensor, torch.dtype]] = {}
        """Ids as int64, and the dtype that they are kept in: of small ones a cast each costs more than one of
        all, at the end of the forward."""
        self._routes: list[RoutedExperts] | None = None

    def _holds(self) -> str:
        rows = "" if self._routes is None else f", routes of {sum(map(len, self._routes))} rows"
        return super()._holds() + rows

    @property
    def routes(self) -> list[RoutedExperts]:
        """One RoutedExperts a micro-batch, in forward order; rows as the routers had them."""
        if self._routes is None:
            raise ReplayError(
                "the routes are complete when the record block has ended without an exception",
                expected="an ended block",
                got=f"a block that is {self._state}",
            )
        return self._routes

    def _choose(self, call: seam.Call) -> torch.Tensor:
        ids, narrow = call.own(), call.owner.narrow
        key = call.owner.label, call.forward.number
        if ids.numel() <= FEW and not ids.is_inference():
            self._wide[key] = ids, narrow
        else:
            # Made under inference_mode it can't be saved for backward, and never is: the int64 copy can.
            self._ids[key] = ids.to(narrow)
        return ids

    def _again(self, router: Router, number: int, device: torch.device) -> torch.Tensor:
        self._narrow()
        ids = self._ids.get((router.label, number))
        return super()._again(router, number, device) if ids is None else ids

    def _end(self, chunk: int, output: object) -> tuple[Forward, bool] | None:
        ended = super()._end(chunk, output)
        self._narrow()
        return ended

    def _narrow(self) -> None:
        """Cast what waits for it, those of one size together."""
        wide, self._wide = self._wide, {}
        alike: dict[object, list[Key]] = {}
        for key, (ids, narrow) in wide.items():
            alike.setdefault((ids.shape, ids.device, narrow), []).append(key)
        self._check_apart(wide)
        for keys in alike.values():
            cast = torch.stack([wide[key][0] for key in keys]).to(wide[keys[0]][1])
            self._ids.update(zip(keys, cast.unbind(), strict=True))

    def _check_apart(self, wide: dict[Key, tuple[torch.Tensor, torch.dtype]]) -> None:
        """Refuse ids of several routers that lie in one buffer: only the last of them are in it now."""
        places = {address(ids): key for key, (ids, _) in wide.items() if ids.numel()}
        if len(places) < sum(bool(ids.numel()) for ids, _ in wide.values()):
            layer, number = next(key for key in wide if key not in places.values())
            raise RouterError(
                "the top-ks of several routers return their ids in one buffer, which is overwritten",
                where=micro_batch(number, layer),
                expected="a tensor of its own from each top-k",
                got="the same memory",
                cause="a patched torch.topk, or a mode, that returns a static buffer (for graph capture)",
            )

    def _tokens_wanted(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Called | None:
        return copied(args, kwargs, self._chunks[0]) if self._keeps_inputs else None

    def _forget(self, key: Key) -> None:
        self._ids.pop(key, None)
        self._wide.pop(key, None)

    def _clear(self) -> None:
        super()._clear()
        self._ids.clear()
        self._wide.clear()

    def _finish(self) -> None:
        count = self._timeline.ended[0]
        self._routes = [micro_batch_routes(self._ids, self._all_routers(), number) for number in range(count)]
        for number in self._tokens.keys() & range(count):
            inputs = Inputs.recorded(self._tokens[number].on_host())
            self._routes[number] = self._routes[number].with_known(inputs=inputs)


def micro_batch_routes(ids: dict[Key, torch.Tensor], routers: list[Router], number: int) -> RoutedExperts:
    """Put the layers of one micro-batch together."""
    if not routers:
        return without_layers()
    routers = sorted(routers, key=lambda router: router.label)
    rows = {router.label: len(ids[router.label, number]) for router in routers}
    problem, cause = "the routers differ in rows", "pass the parts of the model to record() one by one"
    expected, where = "the same number in each layer", micro_batch(number)
    RouterError.unless(len({*rows.values()}) == 1, problem, expected, rows, cause, where)
    found = [ids[router.label, number] for router in routers]
    if len({one.device for one in found}) > 1:
        found = [one.cpu() for one in found]
    experts, labels = routers[0].num_experts, [router.label for router in routers]
    stacked = torch.stack(found, dim=1).to(narrow_dtype(experts)).cpu()
    return RoutedExperts(ids=stacked, layers=labels, num_experts=experts, constant_layers_ok=True, copy=False)
