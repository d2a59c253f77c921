"""The one loop that times: all ways in turn, round by round, each against the first way of the same round.

So a machine that slows down for a while slows all of them, and the ratios stay.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Way:
    """A way to run the same thing, and the block that it runs in."""

    name: str
    run: Callable[[], object]
    block: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext


@dataclass(frozen=True)
class Case:
    """Ways that are held against the first of them.

    Attributes:
        what, tokens: as in `Row`.
        repeats: calls that are timed together.
        per: things that one call does.
        before, after: calls inside the block around the timed ones. Without one before, entering and leaving
            the block are timed, too.
        clock: seconds; of the processor, say, where others share the machine.
    """

    what: str
    tokens: int
    ways: list[Way]
    rounds: int
    repeats: int = 1
    per: int = 1
    device: torch.device = CPU
    before: int = 1
    after: int = 0
    clock: Callable[[], float] = time.perf_counter

    def measure(self) -> dict[str, list[float]]:
        """Microseconds of each way in each round."""
        times: dict[str, list[float]] = {way.name: [] for way in self.ways}
        for number in range(self.rounds + 2):
            turn = number % len(self.ways)
            for way in self.ways[turn:] + self.ways[:turn]:
                spent = self._spent(way)
                if number >= 2:  # the first two rounds warm up
                    times[way.name].append(1e6 * spent / self.repeats / self.per)
        return times

    def _spent(self, way: Way) -> float:
        started = self.clock()
        with way.block():
            if self.before:
                self._run(way, self.before)
                started = self.clock()
            self._run(way, self.repeats)
            ended = self.clock()
            self._run(way, self.after)
        self._run(way, 0)
        return (ended if self.before else self.clock()) - started

    def _run(self, way: Way, times: int) -> None:
        for _ in range(times):
            way.run()
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize()


@dataclass(frozen=True)
class Row:
    """One way at one size, against the first of the same rounds.

    Attributes:
        what: "router" (its forward), "host, ..." (the host's part of it, by routing), "checked, ..." (the
            same in micro-batches that are checked as a whole), "recompute" (forward and backward of
            checkpointed routers), "micro-batch" (a block's hooks on the model, by the routers' forward),
            "other top-k" (one that is no routing), "wrapper" (a call through one that is off), "gather"
            (routes into a rank's rows), "decode" (an engine's answer into routes), "step" (forward and
            backward of a model), "open and close" (a block, by a walk of the modules), "inputs" (the tokens
            of a micro-batch, by its forward), "overlap" (a first micro-batch, judged) or "import" (in a new
            process).
        tokens: 0 where it doesn't depend on them.
        microseconds: median time of one call.
        ratio: median of the rounds' ratios to the first way, with its quartiles.
        over: median difference to the first way in microseconds.
        over_least: the least of these differences.
        waits: how often a micro-batch waits for the device; None where that isn't counted.
    """

    what: str
    tokens: int
    way: str
    microseconds: float
    ratio: float
    ratio_low: float
    ratio_high: float
    over: float
    over_least: float
    rounds: int
    waits: int | None = None


def rows(what: str, tokens: int, times: dict[str, list[float]]) -> Iterator[Row]:
    """A row for each way, from its microseconds in each round; the first way is the yardstick.

    >>> row = list(rows("router", 64, {"live": [2.0, 4.0], "record": [3.0, 6.0]}))[1]
    >>> row.way, row.ratio, row.over, row.over_least
    ('record', 1.5, 1.5, 1.0)
    """
    yardstick = next(iter(times.values()))
    for way, spent in times.items():
        ratios = [one / base for one, base in zip(spent, yardstick, strict=True)]
        over = [one - base for one, base in zip(spent, yardstick, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        yield Row(
            what=what,
            tokens=tokens,
            way=way,
            microseconds=statistics.median(spent),
            ratio=middle,
            ratio_low=low,
            ratio_high=high,
            over=statistics.median(over),
            over_least=min(over),
            rounds=len(spent),
        )
