"""What is measured, and over how many rounds."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import nn

import npu_replay
from benchmarks import capture, decode, gather, host, imports, layout, opening, upstream
from benchmarks.timing import Case, Row, Way, rows
from npu_replay.compat.patching import patches
from npu_replay.compat.patching.patches import Patches
from npu_replay.routes import inputs
from npu_replay.seam.guarded import guard
from npu_replay.smoke import megatron_model

TOKENS = (64, 1024, 8192)
ROUTER: dict[str, Any] = {"hidden_size": 2048, "num_moe_experts": 128, "moe_router_topk": 8}
"""Qwen3-30B-A3B's router."""
STEP: dict[str, Any] = {"num_layers": 2, "hidden_size": 128, "num_moe_experts": 32, "moe_router_topk": 4}
"""A whole model that a CPU runs in seconds."""
LENGTH = 512


@dataclass(frozen=True)
class Part:
    """Something to measure, made when it is its turn.

    Attributes:
        what: as in `Row`.
        title: what is said when it begins.
        seconds: about how long it takes on two cores of a CPU.
    """

    what: str
    title: str
    seconds: float
    measure: Callable[[], Iterable[Row]]

    @property
    def subject(self) -> str:
        return self.what.replace(" ", "-")


def parts(device: torch.device, pairs: int, *, quick: bool) -> Iterator[Part]:
    """All that is measured, router forward first; `quick` leaves out the large sizes."""
    few = max(3, pairs // 10)
    sizes = TOKENS[:2] if quick else TOKENS
    long = min(layout.TOKENS, 4096) if quick else layout.TOKENS

    def part(
        what: str, tokens: int, start: float, round_: float, rounds: int, build: Callable[[], Case]
    ) -> Part:
        title = f"{what}, {tokens:,} tokens" if tokens > 1 else what
        return Part(what, title, start + round_ * (rounds + 2), lambda: _measured(build()))

    for tokens in sizes:
        build = functools.partial(_router, tokens, device, pairs)
        yield part("router", tokens, 2, 0.3 + tokens * 3e-4, pairs, build)
    some = max(5, pairs // 5)
    for routing in host.ROUTINGS:
        measure = functools.partial(_host, routing, some)
        yield Part("host", f"host, {routing}", 1 + 0.45 * (some + 2), measure)
    for routing in host.ROUTINGS:
        measure = functools.partial(_checked, routing, some)
        yield Part("checked", f"checked, {routing}", 1 + 0.3 * (some + 2), measure)
    yield part("recompute", host.TOKENS, 0.5, 1.0, some, lambda: host.recompute(Routers, some))
    seconds = 0.4 * some
    yield Part(
        "micro-batch", "micro-batch", seconds, lambda: rows("micro-batch", 0, host.micro_batch(Routers, some))
    )
    yield part("other top-k", 1, 0, 0.005, pairs, lambda: _others(device, pairs))
    yield part("wrapper", 1, 0, 0.001, pairs, lambda: _wrapper(pairs))
    yield part("gather", 0, 8, 0.01, pairs, lambda: Case("gather", gather.tokens(), gather.ways(), pairs))
    yield part(
        "decode", decode.TOKENS, 2, 0.15, some, lambda: Case("decode", decode.TOKENS, decode.ways(), some)
    )
    yield part(
        *("capture", capture.TOKENS, 0, 0.18, pairs),
        lambda: Case("capture", capture.TOKENS, capture.ways(device), pairs, device=device),
    )
    for tokens in sizes:
        build = functools.partial(_step, tokens, device, few)
        yield part("step", tokens, 0.3, 0.1 + tokens * 5.5e-4, few, build)
    yield part(
        *("open and close", 0, 4, 0.15, pairs),
        lambda: Case("open and close", 0, opening.ways(quick=quick), pairs),
    )
    for what, tokens, make in (
        *(("inputs", sizes[-1], _inputs), ("overlap", sizes[-1], _overlap)),
        ("layout", long, _layout),
    ):
        yield part(what, tokens, 0.2, tokens * 5e-5, few, functools.partial(make, tokens, device, few))
    tries = max(3, pairs // 5)
    seconds = 1.5 * (tries + 1)
    yield Part("import", "import", seconds, lambda: rows("import", 0, imports.times(tries)))


def _host(routing: str, rounds: int) -> Iterable[Row]:
    case = host.case(routing, Routers, rounds)
    measured = zip(_measured(case), case.ways, strict=True)
    return [replace(row, waits=host.waits(way)) for row, way in measured]


def _checked(routing: str, rounds: int) -> Iterable[Row]:
    return _measured(host.checked(routing, Routers, rounds))


def _measured(case: Case) -> Iterable[Row]:
    return rows(case.what, case.tokens, case.measure())


class Routers(nn.Module):
    """Some routers in a row, so that what a micro-batch costs is shared as it is in a model."""

    def __init__(self, count: int, **changes: Any) -> None:
        super().__init__()
        built = megatron_model.model(megatron_model.config(num_layers=count, **(ROUTER | changes)))
        self.routers = nn.ModuleList(layer.mlp.router for layer in built.decoder.layers)
        torch.manual_seed(0)
        for router in self.routers:
            nn.init.normal_(router.weight, std=0.02)  # type: ignore[arg-type]

    def forward(self, hidden: torch.Tensor) -> None:
        for router in self.routers:
            router(hidden)


def _router(tokens: int, device: torch.device, rounds: int) -> Case:
    """Routers in micro-batches 5, 6 and 7, in which as in most only that the ids are shown is checked."""
    before = 5
    repeats = 3
    after = 1
    count = {64: 8, 1024: 2}.get(tokens, 1)
    hidden = torch.randn(tokens, 1, ROUTER["hidden_size"], device=device, requires_grad=True)
    ways = _ways(
        lambda **changes: Routers(count, **changes).to(device).train(),
        lambda routers: routers(hidden),
        calls=before + repeats + after,
    )
    if tokens == TOKENS[0]:
        ways[3:3] = [Way(f"{way.name} by Watch", way.run, _only_watch(way)) for way in ways[1:3]]
    around = {"before": before, "repeats": repeats, "after": after}
    return Case("router", tokens, ways, rounds, per=count, device=device, **around)


def _step(tokens: int, device: torch.device, rounds: int) -> Case:
    length, given = _batch(tokens, device)
    ways = _ways(
        lambda **changes: _model(length, device, **changes),
        lambda model: model(**given).mean().backward(),
        calls=1,
    )
    return Case("step", tokens, ways, rounds, device=device, before=0)


def _ways(build: Callable[..., nn.Module], call: Callable[[nn.Module], object], *, calls: int) -> list[Way]:
    """The module alone, recorded, replayed, and with Megatron's own replay where it has one."""
    ours = build()
    with npu_replay.record(ours) as recording:
        call(ours)
    (routes,) = recording.routes
    ways = [
        Way("live", lambda: call(ours)),
        Way("record", lambda: call(ours), lambda: npu_replay.record(ours)),
        Way("replay", lambda: call(ours), lambda: npu_replay.replay(ours, [routes] * calls)),
    ]
    native = build(moe_enable_routing_replay=True)
    return ways + upstream.record_and_replay(native, lambda: call(native), routes)[1:]


def _only_watch(way: Way) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """The block without the guard on torch.topk: what the general way costs."""

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        with mock.patch.object(guard, "install"), mock.patch.object(guard, "remove"), way.block():
            yield

    return watched


def _others(device: torch.device, rounds: int) -> Case:
    """What a top-k that is nobody's routing pays while a block is open."""
    scores = torch.rand(1, 8, device=device)
    count = 1000

    def run() -> None:
        for _ in range(count):
            torch.topk(scores, 2)

    @contextlib.contextmanager
    def guarded() -> Iterator[None]:
        guard.install(guarded)
        try:
            yield
        finally:
            guard.remove(guarded)

    ways = [Way("live", run), Way("in a block", run, guarded)]
    return Case("other top-k", 1, ways, rounds, per=count, device=device)


def _wrapper(rounds: int) -> Case:
    """What a call costs through a wrapper that is off, in a job that has turned npu_replay off."""

    class Engine:
        def method(self, batch: object) -> None: ...

    engine = Engine()
    count = 1000

    @contextlib.contextmanager
    def wrapped() -> Iterator[None]:
        group = Patches("the bench")
        group.wrap(Engine, "method", lambda original, *args: original(*args), "to time it")
        was_on = patches.is_on()
        patches.turn(False)
        try:
            yield
        finally:
            patches.turn(was_on)
            group.undo()

    def run() -> None:
        for _ in range(count):
            engine.method(None)

    return Case("wrapper", 1, [Way("live", run), Way("off", run, wrapped)], rounds, per=count)


def _inputs(tokens: int, device: torch.device, rounds: int) -> Case:
    """What it costs to keep a micro-batch's token ids and to hold them against the routes, by its forward."""
    given, forward = _forward(tokens, device)

    def check() -> None:
        if (kept := inputs.copied((), {"input_ids": given["input_ids"]})) is not None:
            inputs.Inputs.recorded(kept.on_host()).differing(kept.on_host())

    ways = [forward, Way("tokens kept and checked", check)]
    return Case("inputs", tokens, ways, rounds, device=device)


def _overlap(tokens: int, device: torch.device, rounds: int) -> Case:
    """What it costs to hold a replay's first micro-batch against the routers' own choice."""
    length, given = _batch(tokens, device)
    model = _model(length, device)
    with torch.no_grad(), npu_replay.record(model) as recording:
        model(**given)

    def run(least: float) -> None:
        with torch.no_grad(), npu_replay.replay(model, recording.routes, min_overlap=least):
            model(**given)

    ways = [Way("replay", lambda: run(0)), Way("replay, judged", lambda: run(0.5))]
    return Case("overlap", tokens, ways, rounds, device=device)


def _layout(tokens: int, device: torch.device, rounds: int) -> Case:
    """What it costs to know the rows of a micro-batch, by its forward."""
    given, forward = _forward(tokens, device)
    return Case("layout", tokens, [forward, *layout.ways(given["input_ids"])], rounds, device=device)


def _forward(tokens: int, device: torch.device) -> tuple[dict[str, torch.Tensor], Way]:
    """What the whole model is called with, and its forward without grad."""
    length, given = _batch(tokens, device)
    model = _model(length, device)

    def forward() -> None:
        with torch.no_grad():
            model(**given)

    return given, Way("forward", forward)


def _batch(tokens: int, device: torch.device) -> tuple[int, dict[str, torch.Tensor]]:
    """The length of the sequences, and what a model is called with."""
    length = min(tokens, LENGTH)
    batch = torch.randint(0, 64, (tokens // length, length), device=device)
    return length, {"input_ids": batch, "labels": batch, **megatron_model.causal(batch)}


def _model(length: int, device: torch.device, **changes: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = megatron_model.model(megatron_model.config(**(STEP | changes)), length=length)
    return model.to(device)
