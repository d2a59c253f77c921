"""What a router's call costs the host in an unchecked micro-batch, beside the least that hooks can cost.

The routers are so small that the host is all. «Least» is a bare block: two hooks a router, a torch.topk that
hands out the ids, and one gather that looks for them in the output.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import npu_replay
from benchmarks import upstream
from benchmarks.timing import Case, Row, Way
from npu_replay import RoutedExperts, routers
from npu_replay.sessions.session import Session

SMALL: dict[str, Any] = {"hidden_size": 32, "num_moe_experts": 128, "moe_router_topk": 8}
ROUTERS = 24
TOKENS = 16
_SIGMOID: dict[str, Any] = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
_GROUPS: dict[str, Any] = {"moe_router_num_groups": 8, "moe_router_group_topk": 4}
ROUTINGS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "sigmoid, bias": _SIGMOID,
    "groups, softmax": _GROUPS,
    "groups, sigmoid, bias": _SIGMOID | _GROUPS,
}
_BEFORE = 5
_TIMED = 3
_AFTER = 4


def case(routing: str, build: Callable[..., nn.Module], rounds: int) -> Case:
    """Micro-batches 5, 6 and 7 of blocks over routers of this kind."""
    model, hidden, listed = _recorded(build(ROUTERS, **SMALL, **ROUTINGS[routing]))
    given = [listed[0].layer_ids(label).long() for label in listed[0].layers]

    def run() -> None:
        model(hidden)

    ways = [
        Way("live", run),
        Way("least record", run, lambda: _least(model, None)),
        Way("record", run, lambda: npu_replay.record(model)),
        Way("pin_recompute", run, lambda: npu_replay.pin_recompute(model)),
        Way("least replay", run, lambda: _least(model, given)),
        Way("replay", run, lambda: npu_replay.replay(model, listed)),
    ]
    native = build(ROUTERS, **SMALL, **ROUTINGS[routing], moe_enable_routing_replay=True).train()
    ways += upstream.record_and_replay(native, lambda: native(hidden), listed[0])
    around = {"before": _BEFORE, "repeats": _TIMED, "after": _AFTER}
    return Case(f"host, {routing}", TOKENS, ways, rounds, per=ROUTERS, clock=time.process_time, **around)


def checked(routing: str, build: Callable[..., nn.Module], rounds: int) -> Case:
    """Micro-batches 1 and 2 of the same blocks, in which the whole effect is checked."""
    model, hidden, listed = _recorded(build(ROUTERS, **SMALL, **ROUTINGS[routing]))

    def run() -> None:
        model(hidden)

    ways = [Way("live", run), *(Way(name, run, block) for name, block in _blocks(model, listed).items())]
    around = {"before": 1, "repeats": 2, "after": _BEFORE + _TIMED + _AFTER - 3}
    return Case(f"checked, {routing}", TOKENS, ways, rounds, per=ROUTERS, clock=time.process_time, **around)


def waits(way: Way) -> int:
    """Count how often the host waits for the device in micro-batch 6: once for a CPU's check at its end."""
    names = ("aten::_local_scalar_dense", "aten::nonzero")
    with way.block():
        for _ in range(_BEFORE + 1):
            way.run()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            way.run()
        for _ in range(_TIMED + _AFTER - 2):
            way.run()
    return sum(event.count for event in seen.key_averages() if event.key in names)


def recompute(build: Callable[..., nn.Module], rounds: int) -> Case:
    """Forward and backward of micro-batches 5, 6 and 7, with each router in a checkpoint."""
    model, hidden, listed = _recorded(build(ROUTERS, **SMALL))

    def checkpointed(self: Any, hidden: torch.Tensor) -> Any:
        return sum(checkpoint(router, hidden, use_reentrant=False)[0].sum() for router in self.routers)

    def run() -> None:
        with mock.patch.object(type(model), "forward", checkpointed):
            model(hidden).backward()

    ways = [
        Way("live", run),
        Way("pin_recompute", run, lambda: npu_replay.pin_recompute(model)),
        Way("replay", run, lambda: npu_replay.replay(model, listed)),
    ]
    around = {"before": _BEFORE, "repeats": _TIMED, "after": _AFTER}
    return Case("recompute", TOKENS, ways, rounds, per=ROUTERS, clock=time.process_time, **around)


def micro_batch(build: Callable[..., nn.Module], rounds: int) -> dict[str, list[float]]:
    """Microseconds of a block's two hooks on the model, in micro-batches 5, 6 and 7 of 48 routers."""
    model, hidden, listed = _recorded(build(2 * ROUTERS, **SMALL))
    blocks = _blocks(model, listed)
    times: dict[str, list[float]] = {"the 48 routers, live": [], **{name: [] for name in blocks}}
    for _ in range(rounds):
        started = time.process_time()
        for _ in range(_TIMED):
            model(hidden)
        times["the 48 routers, live"].append(1e6 * (time.process_time() - started) / _TIMED)
        for name, block in blocks.items():
            with _timed_hooks() as spent, block():
                for _ in range(_BEFORE + _TIMED + _AFTER):
                    model(hidden)
            timed = slice(2 * _BEFORE, 2 * (_BEFORE + _TIMED))  # a micro-batch begins and ends
            times[name].append(1e6 * sum(spent[timed]) / _TIMED)
    return times


def _blocks(model: nn.Module, listed: list[RoutedExperts]) -> dict[str, Callable[[], Any]]:
    return {
        "record": lambda: npu_replay.record(model),
        "pin_recompute": lambda: npu_replay.pin_recompute(model),
        "replay": lambda: npu_replay.replay(model, listed),
    }


def _recorded(model: nn.Module) -> tuple[nn.Module, torch.Tensor, list[RoutedExperts]]:
    """The model in train mode, its input, and its routes for all micro-batches of a block."""
    hidden = torch.randn(TOKENS, 1, SMALL["hidden_size"], requires_grad=True)
    with npu_replay.record(model.train()) as recording:
        model(hidden)
    return model, hidden, recording.routes * (_BEFORE + _TIMED + _AFTER)


@contextlib.contextmanager
def _timed_hooks() -> Iterator[list[float]]:
    """Note the seconds of each call of the hooks that a block hangs on the model."""
    spent: list[float] = []

    def timed(hook: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.process_time()
            try:
                return hook(*args)
            finally:
                spent.append(time.process_time() - started)

        return call

    names = ("_chunk_begins", "_chunk_ends")
    with mock.patch.multiple(Session, **{name: timed(getattr(Session, name)) for name in names}):
        yield spent


def over_least(mine: Sequence[Row]) -> str:
    """Return the cost of each block by the least, of one routing."""
    # Of the rounds' ratios to live: a median of times would compare times at which the machine ran otherwise.
    ratios = {row.way: row.ratio for row in mine}
    bases = {"record": "least record", "pin_recompute": "least record", "replay": "least replay"}
    said = ", ".join(f"{way} {ratios[way] / ratios[base]:.2f}" for way, base in bases.items())
    return f"{ROUTERS} routers, {TOKENS} tokens, hidden {SMALL['hidden_size']}; x the least: {said}"


@dataclass
class _Least:
    """Hooks of one router; `armed` holds the one whose call runs."""

    given: torch.Tensor | None
    armed: list[_Least]
    ids: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    held: torch.Tensor | None = None

    def begins(self, _: nn.Module, __: Any) -> None:
        self.armed[:] = [self]

    def ends(self, _: nn.Module, __: Any, output: Any) -> None:
        self.armed.clear()
        self.held = output[1].gather(1, self.ids)


@contextlib.contextmanager
def _least(model: nn.Module, given: Sequence[torch.Tensor] | None) -> Iterator[None]:
    native = torch.topk
    armed: list[_Least] = []
    experts = SMALL["num_moe_experts"]
    topk = SMALL["moe_router_topk"]

    def handing_out(*args: Any, **kwargs: Any) -> Any:
        scores = args[0] if args else kwargs["input"]
        k = args[1] if len(args) > 1 else kwargs["k"]
        if not armed or scores.shape[-1] != experts or k != topk:
            return native(*args, **kwargs)
        call = armed.pop()
        if call.given is None:
            values, call.ids = native(*args, **kwargs)
            return torch.return_types.topk((values, call.ids))
        call.ids = call.given
        return torch.return_types.topk((scores.gather(1, call.ids), call.ids))

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "topk", handing_out))
        for number, router in enumerate(routers.find([model])[0]):
            call = _Least(None if given is None else given[number], armed)
            for handle in (
                router.module.register_forward_pre_hook(call.begins),
                router.module.register_forward_hook(call.ends),
            ):
                stack.callback(handle.remove)
        yield
