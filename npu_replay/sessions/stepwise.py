"""Record and replay one micro-batch at a time, for loops that give and take routes in between.

`record` and `replay` have all routes after the block, or before it. A framework's schedule hands them over in
its forward step: before a chunk's forward, or right after it.
"""

from __future__ import annotations

from typing import Any

import torch

from npu_replay.errors import MicroBatchError, micro_batch
from npu_replay.routers import Model, Router
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.sessions.device_routes import DeviceRoutes
from npu_replay.sessions.micro_batches import Forward
from npu_replay.sessions.record import Recording, micro_batch_routes
from npu_replay.sessions.replay import AnyReplay


class StepReplay(AnyReplay):
    """A replay that is given each chunk's routes just before its forward.

        with StepReplay(chunks) as session:
            session.give(chunk, routes)
            chunks[chunk](...)

    Args:
        model: see Session.
        errors_wait: see Block.
        options: see AnyReplay.
    """

    def __init__(self, model: Model, *, errors_wait: bool = False, **options: Any) -> None:
        super().__init__(model, **options)
        self.errors_wait = errors_wait
        self._rows = 0
        self._rows_without_route = 0
        self._bytes = 0
        self._replayed: set[int] = set()

    def give(self, chunk: int, routes: RoutedExperts) -> None:
        """Give a chunk the routes of its next forward; again before it, they take the place of the first.

        Raises:
            RouterError: the routes lack a layer of this chunk, or have another top-k or number of experts.
        """
        number = self._timeline.ended[chunk]
        self._check_layers(number, routes, self._routers[chunk])
        self._given[chunk, number] = DeviceRoutes(routes, self.labels(chunk))

    @property
    def first_chunk(self) -> int:
        """The first chunk with a router; 0 if none has one."""
        return next((chunk for chunk, routers in enumerate(self._routers) if routers), 0)

    def metrics(self) -> dict[str, float]:
        """Micro-batches, rows of all chunks, rows without a route, seconds; live_mismatch if asked for."""
        return super().metrics() | {"rows": self._rows, "rows_without_route": self._rows_without_route}

    def counts(self) -> dict[str, int]:
        """Also routers that were given routes, and the bytes of these."""
        return super().counts() | {"replayed": len(self._replayed), "bytes": self._bytes}

    def _prepare(self, router: Router, forward: Forward, rows: int, device: torch.device) -> Any:
        prepared = super()._prepare(router, forward, rows, device)
        self._replayed.add(router.label)
        return prepared

    def _check_forward(self, forward: Forward) -> None:
        if self._routers[forward.chunk]:
            self._routes_of(forward.chunk, forward.number)

    def _end(self, chunk: int, output: object) -> tuple[Forward, bool] | None:
        ended = super()._end(chunk, output)
        complete = ended is not None and ended[1]
        if complete and (given := self._given.get((chunk, self._timeline.ended[chunk] - 1))):
            self._rows += given.rows
            self._bytes += given.routes.ids.nbytes
            self._rows_without_route += 0 if given.missing is None else len(given.missing)
        return ended

    def _check_complete(self) -> None:
        super()._check_complete()
        left = [at for at in self._given if at[1] >= self._timeline.ended[at[0]]]
        if left:
            raise MicroBatchError(
                "routes were given for a forward that never came",
                where=f"{micro_batch(left[0][1])}, chunk {left[0][0]}",
                expected="a forward of the chunk after its routes",
                got="none",
                cause="a schedule that was cut short, or a forward of another module than this chunk",
            )


class StepRecording(Recording):
    """A record whose routes are taken chunk by chunk, right after each forward.

        with StepRecording(chunks) as session:
            chunks[chunk](...)
            routes = session.take(chunk)

    Args:
        model: see Session.
        errors_wait: see Block.
    """

    def __init__(self, model: Model, *, errors_wait: bool = False) -> None:
        super().__init__(model, inputs=False)  # what a framework does with them it checks by itself
        self.errors_wait = errors_wait

    def take(self, chunk: int) -> RoutedExperts:
        """The routes of a chunk's last forward, rows as its routers had them; no layers without routers."""
        number = self._timeline.ended[chunk] - 1
        if number < 0:
            raise MicroBatchError(
                "nothing was recorded yet",
                where=f"chunk {chunk}",
                expected="a forward of the chunk before its routes are taken",
                got="none",
                cause="a forward of another module than this chunk",
            )
        return micro_batch_routes(self._ids, self._routers[chunk], number)

    def last(self, router: Router) -> torch.Tensor | None:
        """The ids of a router's last call, [rows, topk], narrow, on its device; None before the first."""
        self._narrow()
        numbers = [number for label, number in self._ids if label == router.label]
        return self._ids[router.label, max(numbers)] if numbers else None

    def _end(self, chunk: int, output: object) -> tuple[Forward, bool] | None:
        """What was taken is kept for recomputes alone."""
        ended = super()._end(chunk, output)
        labels = {router.label for router in self._routers[chunk]}
        last = self._timeline.ended[chunk] - 1
        for key in list(self._ids):
            if key[0] in labels and key[1] < last and key not in self._pending:
                del self._ids[key]
        return ended

    def _finish(self) -> None:
        """Nothing is put together: it was taken."""
