"""Record and replay one micro-batch at a time, for loops that give and take routes in between.

`record` and `replay` have all routes after the block, or before it. A framework's schedule hands them over in
its forward step: before a chunk's forward, or right after it.
"""

from __future__ import annotations

import torch

from npu_replay.errors import MicroBatchError, micro_batch
from npu_replay.routers import Model, Router
from npu_replay.routes.routed_experts import RoutedExperts
from npu_replay.sessions import seam
from npu_replay.sessions.micro_batches import Forward
from npu_replay.sessions.record import Recording, micro_batch_routes
from npu_replay.sessions.replay import Replaying
from npu_replay.sessions.staging import Packet, Staged
from npu_replay.sessions.witness import Key


class Feed(Replaying):
    """A replay that is given each chunk's routes just before its forward.

        with Feed(chunks) as session:
            session.feed(chunk, routes)
            chunks[chunk](...)

    Args:
        model: see Session.
        live_mismatch, max_live_mismatch: see replay.
    """

    def __init__(
        self, model: Model, *, live_mismatch: bool = False, max_live_mismatch: float | None = None
    ) -> None:
        super().__init__(model, live_mismatch=live_mismatch, max_live_mismatch=max_live_mismatch)
        self._packets: dict[tuple[int, int], Packet] = {}
        self._rows = 0
        self._rows_without_route = 0
        self._replayed: set[int] = set()

    def feed(self, chunk: int, routes: RoutedExperts) -> None:
        """Give a chunk the routes of its next forward; again before it, they take the place of the first.

        Raises:
            RouterError: the routes lack a layer of this chunk, or have another top-k or number of experts.
        """
        number = self._timeline.ended[chunk]
        self._check_layers(number, routes, self._routers[chunk])
        self._packets[chunk, number] = Packet(routes)

    def labels(self, chunk: int) -> list[int]:
        """The decoder layers of a chunk's routers, ascending."""
        return [router.label for router in self._routers[chunk]]

    @property
    def first_chunk(self) -> int:
        """The first chunk with a router; 0 if none has one."""
        return next((chunk for chunk, routers in enumerate(self._routers) if routers), 0)

    def metrics(self) -> dict[str, float]:
        """Micro-batches, rows of all chunks, rows without a route, seconds; live_mismatch if asked for."""
        return super().metrics() | {"rows": self._rows, "rows_without_route": self._rows_without_route}

    def counts(self) -> dict[str, int]:
        """Also routers that were given routes."""
        return super().counts() | {"replayed": len(self._replayed)}

    def _live(self, router: Router, forward: Forward, rows: int, device: torch.device) -> seam.Choose:
        choose = super()._live(router, forward, rows, device)
        self._replayed.add(router.label)
        return choose

    def _packet(self, chunk: int, number: int) -> Packet:
        packet = self._packets.get((chunk, number))
        if packet is None:
            raise _no_routes(chunk, number)
        return packet

    def _stage(self, chunk: int, number: int, device: torch.device) -> Staged:
        return self._packet(chunk, number).staged(self.labels(chunk), device)

    def _check_forward(self, forward: Forward) -> None:
        if self._routers[forward.chunk]:
            self._packet(forward.chunk, forward.number)

    def _end(self, chunk: int, output: object) -> None:
        number = self._timeline.ended[chunk]
        super()._end(chunk, output)
        packet = self._packets.get((chunk, number))
        if packet is not None and self._timeline.ended[chunk] > number:
            packet.unstage()
            self._rows += len(packet.routes)
            self._rows_without_route += 0 if packet.missing is None else len(packet.missing)

    def _check_complete(self) -> None:
        super()._check_complete()
        left = [at for at in self._packets if at[1] >= self._timeline.ended[at[0]]]
        if left:
            raise MicroBatchError(
                "routes were given for a forward that never came",
                where=f"{micro_batch(left[0][1])}, chunk {left[0][0]}",
                expected="a forward of the chunk after its routes",
                got="none",
                cause="a schedule that was cut short, or a forward of another module than this chunk",
            )

    def _clear(self) -> None:
        super()._clear()
        self._packets.clear()


def _no_routes(chunk: int, number: int) -> MicroBatchError:
    return MicroBatchError(
        "no routes were given for this forward",
        where=f"{micro_batch(number)}, chunk {chunk}",
        expected="the routes of each forward before it",
        got="none",
        cause="an extra forward (a reference pass, an evaluation) while a replay is on",
    )


class Tap(Recording):
    """A record whose routes are taken chunk by chunk, right after each forward.

    with Tap(chunks) as session:
        chunks[chunk](...)
        routes = session.take(chunk)
    """

    def __init__(self, model: Model) -> None:
        super().__init__(model, inputs=False)  # what a framework does with them it checks by itself

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
        numbers = [number for label, number in self._ids if label == router.label]
        return self._ids[router.label, max(numbers)] if numbers else None

    def _end(self, chunk: int, output: object) -> None:
        super()._end(chunk, output)
        self._drop_earlier(chunk, self._timeline.ended[chunk] - 1)

    def _drop_earlier(self, chunk: int, number: int) -> None:
        """What was taken is kept for recomputes alone."""
        labels = {router.label for router in self._routers[chunk]}
        done: list[Key] = [
            key for key in self._ids if key[0] in labels and key[1] < number and key not in self._pending
        ]
        for key in done:
            del self._ids[key]

    def _finish(self) -> None:
        """Nothing is put together: it was taken."""
