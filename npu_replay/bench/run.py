"""npu-replay bench: what record, replay and layouts cost, as ratios within one run.

Every round runs all ways in turn and each way's time is divided by that of the first way (the live router) in
the same round; the table shows the median of the rounds and the quartiles beside it, so that a machine that
slows down for a while slows all of them.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

import torch
from torch import nn

import npu_replay
from npu_replay import RoutedExperts
from npu_replay.bench import decode as bench_decode
from npu_replay.bench import gather as bench_gather
from npu_replay.bench import imports as bench_import
from npu_replay.compat import probe
from npu_replay.demo import megatron_model
from npu_replay.devices import megatron_on, one_thread, pick
from npu_replay.routes import inputs
from npu_replay.routes.file import check_place, write_whole
from npu_replay.sessions import seam, session
from npu_replay.tables import Table, terminal

TOKENS = (64, 1024, 8192)
ROUTER: dict[str, Any] = {
    # Qwen3-30B-A3B's router
    "hidden_size": 2048,
    "num_moe_experts": 128,
    "moe_router_topk": 8,
}
STEP: dict[str, Any] = {
    # a whole model that a CPU runs in seconds
    "num_layers": 2,
    "hidden_size": 128,
    "num_moe_experts": 32,
    "moe_router_topk": 4,
}
LENGTH = 512

Block = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Way:
    """A way to run the same thing: its module, and the block that it runs in."""

    name: str
    run: Callable[[], object]
    block: Block = contextlib.nullcontext


@dataclass(frozen=True)
class Row:
    """One way at one size, against the first of the same rounds.

    Attributes:
        what: "router" (its forward), "other top-k" (one that is no routing), "gather" (routes into a rank's
            rows), "decode" (an engine's answer into routes), "step" (forward and backward of a model),
            "inputs" (the tokens of a micro-batch, by its forward) or "import" (in a new process).
        tokens: none where it doesn't depend on them.
        microseconds: median time of one call.
        ratio: median of the rounds' ratios to the first way, with its quartiles.
        over: median difference to the first way in microseconds.
        over_least: the least of these differences.
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


def main(*, device: str, pairs: int, out: Path | None, force: bool) -> list[Row]:
    """Measure, print the table, and write it to `out` as JSON if one is given."""
    probe.require(probe.MEGATRON, "npu-replay bench")
    if out is not None:
        check_place(out, overwrite=force)
    from rich.progress import Progress

    console = terminal()
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("measuring", total=None)
        about, rows = measured(pick(device), pairs, lambda title: bar.update(task, description=title))
    console.print(_heading(about), soft_wrap=True)
    console.print(_table(rows))
    console.print(bench_gather.sizes(), soft_wrap=True)
    decoded = {row.way: row.microseconds for row in rows if row.what == "decode"}
    console.print(bench_decode.sizes(decoded), soft_wrap=True)
    imported = {row.way: row.over_least for row in rows if row.what == "import" and row.over}
    console.print(bench_import.least(imported), soft_wrap=True)
    if out is not None:
        result = {"about": about, "rows": [asdict(row) for row in rows]}
        write_whole(out, json.dumps(result, indent=1).encode(), overwrite=force)
        console.print(f"Wrote {out}", soft_wrap=True)
    return rows


def measured(
    device: torch.device, pairs: int, tell: Callable[[str], None]
) -> tuple[dict[str, Any], list[Row]]:
    """What was measured on, and all rows."""
    with one_thread(), megatron_on(device):
        rows = list(measure(device, pairs, tell))
        return _about(device), rows


def measure(device: torch.device, pairs: int, tell: Callable[[str], None]) -> Iterator[Row]:
    """All rows, router forward first."""
    megatron_model.start(device)
    for tokens in TOKENS:
        tell(f"router forward, {tokens} tokens")
        yield from _router_rows(tokens, device, pairs)
    tell("top-k of others")
    yield from _others_rows(device, pairs)
    tell("gather")
    yield from _gather_rows(pairs)
    tell("decode")
    yield from _decode_rows(max(5, pairs // 5))
    for tokens in TOKENS:
        tell(f"whole step, {tokens} tokens")
        yield from _step_rows(tokens, device, max(3, pairs // 10))
    yield from _input_rows(TOKENS[-1], device, max(3, pairs // 10))
    tell("import")
    yield from _summary("import", 0, bench_import.times(max(3, pairs // 5)))


class Routers(nn.Module):
    """Some routers in a row, so that what a micro-batch costs is shared as it is in a model."""

    def __init__(self, routers: list[nn.Module]) -> None:
        super().__init__()
        self.routers = nn.ModuleList(routers)

    def forward(self, hidden: torch.Tensor) -> None:
        for router in self.routers:
            router(hidden)


def _router_rows(tokens: int, device: torch.device, rounds: int) -> Iterator[Row]:
    count = {64: 8, 1024: 2}.get(tokens, 1)
    repeats = {64: 8, 1024: 2}.get(tokens, 1)
    hidden = torch.randn(tokens, 1, ROUTER["hidden_size"], device=device, requires_grad=True)
    ours = _routers(count, device)
    with npu_replay.record(ours) as recording:
        ours(hidden)
    routes = [recording.routes[0]] * (repeats + 1)

    def run() -> None:
        ours(hidden)

    ways = [
        Way("live", run),
        Way("record", run, lambda: npu_replay.record(ours)),
        Way("replay", run, lambda: npu_replay.replay(ours, routes)),
    ]
    if tokens == TOKENS[0]:
        ways += [
            Way("record by Watch", run, _only_watch(lambda: npu_replay.record(ours))),
            Way("replay by Watch", run, _only_watch(lambda: npu_replay.replay(ours, routes))),
        ]
    if (native := _native_routers(ours, recording.routes[0], device)) is not None:
        ways.append(Way("Megatron's own", lambda: native(hidden)))
    yield from _rows("router", tokens, ways, rounds, repeats, per=count, device=device)


def _routers(count: int, device: torch.device, **changes: Any) -> Routers:
    config = megatron_model.config(num_layers=count, **(ROUTER | changes))
    model = megatron_model.model(config)
    torch.manual_seed(0)
    routers = [layer.mlp.router for layer in model.decoder.layers]
    for router in routers:
        nn.init.normal_(router.weight, std=0.02)
    return Routers(routers).to(device).train()


def _native_routers(ours: Routers, routes: RoutedExperts, device: torch.device) -> Routers | None:
    """The same routers with Megatron's own replay of the same routes; None where it has none."""
    if not _has_native_replay():
        return None
    native = _routers(len(ours.routers), device, moe_enable_routing_replay=True)
    native.load_state_dict(ours.state_dict(), strict=False)
    _set_native(native, routes, device)
    return native


def _has_native_replay() -> bool:
    from importlib.util import find_spec

    return find_spec("megatron.core.transformer.moe.router_replay") is not None


def _set_native(model: nn.Module, routes: RoutedExperts, device: torch.device) -> None:
    """Make Megatron's own replay answer with `routes` in every forward from now on."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    routers = [module for module in model.modules() if getattr(module, "router_replay", None) is not None]
    for label, router in zip(routes.layers, routers, strict=True):
        replay: Any = router.router_replay
        replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        replay.target_topk_idx = routes.layer_ids(label).long().to(device)


def _only_watch(block: Block) -> Block:
    """The block without the guard on torch.topk: what the general way costs."""

    @contextlib.contextmanager
    def watched() -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(seam.guard, "install"))
            stack.enter_context(mock.patch.object(seam.guard, "remove"))
            stack.enter_context(mock.patch.object(session, "_ways", WeakKeyDictionary()))
            stack.enter_context(block())
            yield

    return watched


def _others_rows(device: torch.device, rounds: int) -> Iterator[Row]:
    """What a top-k that is nobody's routing pays while a block is open."""
    scores = torch.rand(1, 8, device=device)
    count = 1000

    def run() -> None:
        for _ in range(count):
            torch.topk(scores, 2)

    @contextlib.contextmanager
    def guarded() -> Iterator[None]:
        seam.guard.install()
        try:
            yield
        finally:
            seam.guard.remove()

    ways = [Way("live", run), Way("in a block", run, guarded)]
    yield from _rows("other top-k", 1, ways, rounds, 1, per=count, device=device)


def _gather_rows(rounds: int) -> Iterator[Row]:
    ways = [Way(name, run) for name, run in bench_gather.ways().items()]
    yield from _rows("gather", bench_gather.tokens(), ways, rounds, 1, per=1, device=torch.device("cpu"))


def _decode_rows(rounds: int) -> Iterator[Row]:
    ways = [Way(name, run) for name, run in bench_decode.ways().items()]
    yield from _rows("decode", bench_decode.TOKENS, ways, rounds, 1, per=1, device=torch.device("cpu"))


def _step_rows(tokens: int, device: torch.device, rounds: int) -> Iterator[Row]:
    length = min(tokens, LENGTH)
    batch = torch.randint(0, 64, (tokens // length, length), device=device)
    arguments = megatron_model.causal(batch)

    def model(**changes: Any) -> nn.Module:
        torch.manual_seed(0)
        config = megatron_model.config(**(STEP | changes))
        built: nn.Module = megatron_model.model(config, length=length).to(device)
        return built

    def step(of: nn.Module) -> None:
        of(input_ids=batch, labels=batch, **arguments).mean().backward()

    ours = model()
    with npu_replay.record(ours) as recording:
        step(ours)
    routes = recording.routes
    ways = [
        Way("live", lambda: step(ours)),
        Way("record", lambda: step(ours), lambda: npu_replay.record(ours)),
        Way("replay", lambda: step(ours), lambda: npu_replay.replay(ours, routes)),
    ]
    if _has_native_replay():
        native = model(moe_enable_routing_replay=True)
        _set_native(native, routes[0], device)
        ways.append(Way("Megatron's own", lambda: step(native)))
    yield from _rows("step", tokens, ways, rounds, 1, per=1, device=device, warm=False)


def _input_rows(tokens: int, device: torch.device, rounds: int) -> Iterator[Row]:
    """What it costs to keep a micro-batch's token ids and to hold them against the routes, by its forward."""
    length = min(tokens, LENGTH)
    batch = torch.randint(0, 64, (tokens // length, length), device=device)
    arguments = megatron_model.causal(batch)
    torch.manual_seed(0)
    model = megatron_model.model(megatron_model.config(**STEP), length=length).to(device)

    def forward() -> None:
        with torch.no_grad():
            model(input_ids=batch, labels=batch, **arguments)

    def check() -> None:
        if (kept := inputs.copied((), {"input_ids": batch})) is not None:
            inputs.Recorded.of(kept.cpu()).fit(kept.cpu())

    ways = [Way("forward", forward), Way("tokens kept and checked", check)]
    yield from _rows("inputs", tokens, ways, rounds, 1, per=1, device=device)


def _rows(
    what: str,
    tokens: int,
    ways: list[Way],
    rounds: int,
    repeats: int,
    *,
    per: int,
    device: torch.device,
    warm: bool = True,
) -> Iterator[Row]:
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for number in range(rounds + 2):
        turned = ways[number % len(ways) :] + ways[: number % len(ways)]
        for way in turned:
            spent = _timed(way, repeats, device, warm=warm) / per
            if number >= 2:  # the first two rounds warm up
                times[way.name].append(spent)
    yield from _summary(what, tokens, times)


def _summary(what: str, tokens: int, times: dict[str, list[float]]) -> Iterator[Row]:
    """A row for each way, from its microseconds in each round; the first way is the yardstick."""
    live = next(iter(times.values()))
    for way, spent in times.items():
        ratios = [one / base for one, base in zip(spent, live, strict=True)]
        over = [one - base for one, base in zip(spent, live, strict=True)]
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


def _timed(way: Way, repeats: int, device: torch.device, *, warm: bool) -> float:
    """Microseconds of one call. With `warm`, inside the block and after a first micro-batch."""
    started = time.perf_counter()
    with way.block():
        if warm:
            way.run()
            _wait(device)
            started = time.perf_counter()
        for _ in range(repeats):
            way.run()
        _wait(device)
        inside = time.perf_counter() - started
    _wait(device)
    return 1e6 * (inside if warm else time.perf_counter() - started) / repeats


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def _about(device: torch.device) -> dict[str, Any]:
    import megatron.core

    name = "CPU" if device.type == "cpu" else getattr(torch, device.type).get_device_name()
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "megatron-core": megatron.core.__version__,
        "router": ROUTER,
        "step": STEP,
    }


def _heading(about: dict[str, Any]) -> str:
    return (
        f"{about['device']}, {about['threads']} threads, torch {about['torch']}, "
        f"Megatron-core {about['megatron-core']}\n"
        f"router: hidden {ROUTER['hidden_size']}, top-{ROUTER['moe_router_topk']} of "
        f"{ROUTER['num_moe_experts']}; forward with grad, inside an open block\n"
        f"step: {STEP['num_layers']} layers, hidden {STEP['hidden_size']}, top-{STEP['moe_router_topk']} of "
        f"{STEP['num_moe_experts']}; forward, backward, block opened and closed"
    )


def _table(rows: list[Row]) -> Table:
    lines: list[tuple[str, ...]] = []
    previous = None
    for row in rows:
        place = row.what, row.tokens
        if previous is not None and place != previous:
            lines.append(())
        against = (
            ("", "", "")
            if place != previous
            else (_figure(row.over, "+"), f"{row.ratio:.2f}", f"{row.ratio_low:.2f}-{row.ratio_high:.2f}")
        )
        first = ("", "") if place == previous else (row.what, f"{row.tokens:,}" if row.tokens else "")
        lines.append((*first, row.way, _figure(row.microseconds), *against))
        previous = place
    titles = ("", "tokens", "way", "µs a call", "over base", "x base", "quartiles")
    return Table(titles, lines, numbers=range(3, 7), ruled=True)


def _figure(microseconds: float, sign: str = "") -> str:
    return f"{microseconds:{sign},.{0 if abs(microseconds) >= 10 else 2}f}"
