"""record, replay, pin_recompute and the command line on an accelerator, with routers in plain torch."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import npu_device
import npu_replay
from npu_replay import NoEffect, RoutedExperts, devices
from npu_replay.doctor import self_test
from npu_replay.sessions.replay import StepReplay
from zoo.outcome import check_own_record, same
from zoo.toys import EXPERTS, ROWS, ToyModel, ToyRouter, foreign, plain, tokens

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.usefixtures("toy_routers"),
]

SEEDS = (0, 1, 2)
COUNT = 11
"""Micro-batches where waits and errors are looked for: of 1 to 9, four are checked; the last is judged."""
RECOMPUTE = (None, "reentrant", "non-reentrant")
Result = tuple[list[torch.Tensor], list[torch.Tensor]]


def run(model: nn.Module, device: torch.device) -> Result:
    """One backward over the sum of the micro-batches' losses; the losses and every gradient, on the CPU."""
    model.zero_grad()
    losses = [model(tokens(seed).to(device).requires_grad_()).square().mean() for seed in SEEDS]
    torch.stack(losses).sum().backward()
    grads = [p.grad for p in model.parameters()]
    assert all(grad is not None and grad.device.type == device.type for grad in grads)
    return [loss.detach().cpu() for loss in losses], [grad.to("cpu", copy=True) for grad in grads]


def check_close(a: Result, b: Result) -> None:
    """Equal but for the order in which a device adds; another expert's gradient is far off."""
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def replayed(model: nn.Module, routes: list[RoutedExperts], device: torch.device) -> Result:
    with npu_replay.replay(model, routes):
        return run(model, device)


@pytest.mark.parametrize("recompute", RECOMPUTE, ids=str)
def test_a_record_changes_nothing_and_its_replay_repeats_it(
    recompute: str | None, device: torch.device
) -> None:
    model = ToyModel(recompute=recompute).to(device)
    recorded = check_own_record(model, partial(run, model, device))
    assert all(routes.ids.device.type == "cpu" for routes in recorded)


@pytest.mark.parametrize("recompute", RECOMPUTE, ids=str)
def test_foreign_routes_give_the_cpus_losses_and_gradients(
    recompute: str | None, device: torch.device
) -> None:
    """Every recompute finds its own micro-batch from the device's thread."""
    model = ToyModel(recompute=recompute)
    expected = replayed(model, foreign(len(SEEDS)), torch.device("cpu"))
    threads = set()
    model.layers[0].router.register_forward_hook(lambda *_: threads.add(threading.get_ident()))
    outcome = replayed(model.to(device), foreign(len(SEEDS)), device)
    check_close(outcome, expected)
    on_its_own = device.type != "cpu" and recompute is not None
    assert len(threads) == 1 + on_its_own, "backward, and the recompute in it, run on a thread of the device"
    assert not same(run(model, device), outcome), "the routes were the routers' own"


@pytest.mark.parametrize("recompute", RECOMPUTE, ids=str)
def test_gathered_routes_go_there_by_pinned_memory(
    recompute: str | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several micro-batches are on their way at once; none of the copies may be let go before it is there."""
    layout = npu_replay.TokenLayout.padded([ROWS - 3, 2], length=ROWS // 2 + 3, order="batch")
    sequences = [
        sample.take(range(size)) for sample, size in zip(foreign(len(SEEDS)), layout.lengths, strict=False)
    ]
    gathered = [layout.gather(sequences) for _ in SEEDS]
    rows = len(layout.rows)
    pins = []
    pin = torch.Tensor.pin_memory
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pins.append(self.shape) or pin(self))

    def losses(where: torch.device) -> Result:
        model = ToyModel(recompute=recompute).to(where)
        with npu_replay.replay(model, gathered):
            model.zero_grad()
            each = [model(tokens(seed, rows).to(where).requires_grad_()).square().mean() for seed in SEEDS]
            torch.stack(each).sum().backward()
        return [loss.detach().cpu() for loss in each], [weight.grad.cpu() for weight in model.parameters()]

    expected = losses(torch.device("cpu"))
    assert not pins
    check_close(losses(device), expected)
    assert device.type == "cpu" or len(pins) >= len(SEEDS)


def with_a_mask(router: ToyRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return plain(router, scores.masked_fill(scores < 0.01, 0.0))


@contextlib.contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Fail where the host waits for the device."""
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    else:
        before = len(npu_device.waits)
        yield
        assert npu_device.waits[before:] == []


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("recompute", RECOMPUTE, ids=str)
@pytest.mark.parametrize("way", ["record", "replay", "rows without a route", "errors wait", "pin_recompute"])
def test_no_micro_batch_but_the_last_waits_for_the_device(
    way: str, recompute: str | None, device: torch.device
) -> None:
    """Where routes aren't held against the routers' own choice, which waits in checked micro-batches."""
    model = ToyModel(ToyRouter(), ToyRouter(select=with_a_mask, masks=True), recompute=recompute).to(device)
    recorded = torch.arange(ROWS) % 3 > 0 if way == "rows without a route" else None
    routes = foreign(COUNT, recorded=recorded)
    inputs = [tokens(seed).to(device).requires_grad_() for seed in range(COUNT)]
    blocks: dict[str, Any] = {
        "record": lambda: npu_replay.record(model),
        "pin_recompute": lambda: npu_replay.pin_recompute(model),
        "errors wait": lambda: StepReplay(model, errors_wait=True, min_overlap=0),
    }
    with blocks.get(way, lambda: npu_replay.replay(model, routes, min_overlap=0))() as session:

        def step(number: int) -> None:
            if way == "errors wait":
                session.give(0, routes[number])
            model(inputs[number]).square().mean().backward()

        step(0)  # torch makes some of its parts with their first use
        with no_waits(device):
            for number in range(1, COUNT - 1):
                step(number)
        step(COUNT - 1)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("number", [0, 1, 5, 9, COUNT - 1])
def test_an_error_that_comes_later_names_its_own_micro_batch(number: int, device: torch.device) -> None:
    def changes(router: ToyRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = torch.topk(scores, router.topk)
        return values, (ids + 1) % EXPERTS if running == [number] else ids

    running: list[int] = []
    model = ToyModel(ToyRouter(), ToyRouter(select=changes)).to(device)
    expected = pytest.raises(NoEffect, match=rf"micro-batch {number}, layer 1")
    with expected, npu_replay.replay(model, foreign(COUNT), min_overlap=0):
        for seed in range(COUNT):
            running[:] = [seed]
            model(tokens(seed).to(device)).square().mean().backward()


def test_the_self_test_passes(device: torch.device) -> None:
    """It once failed on a simulated device, in the check of the gathered scores."""
    assert self_test.run(device.type) == ""


@pytest.mark.usefixtures("accelerator")
def test_the_device_is_the_one_that_auto_picks_and_the_report_names(device: torch.device) -> None:
    states = {capability.name: capability.state for capability in npu_replay.report().capabilities}
    assert states[device.type.upper()] == "works"
    assert devices.available() == [device.type, "cpu"]
    assert devices.pick(device.type) == device
    with pytest.raises(npu_replay.ReplayError, match=rf"no xpu device.*Expected {device.type} or cpu"):
        devices.pick("xpu")
