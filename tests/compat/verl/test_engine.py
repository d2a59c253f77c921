"""A pass of an engine, without verl: what is opened, settled and left, on a small model in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from npu_replay import routers
from npu_replay.compat.verl import engine as verl_engine
from npu_replay.compat.verl.actions import RECORD, REPLAY, switch
from npu_replay.errors import MicroBatchError, ReplayError
from toys import ROWS, TOPK, ToyModel, ToyRouters, hooks, tokens


@pytest.fixture(autouse=True)
def toy_routers() -> Iterator[None]:
    routers.register("toys", ToyRouters())
    yield
    routers.unregister("toys")
    assert switch.job is None
    assert not switch._sessions
    switch.clear()


class Engine:
    """Runs what it is given, as verl's engine runs a schedule."""

    def __init__(self, mode: str = "R2") -> None:
        self.module = [ToyModel()]
        self.settings = SimpleNamespace(mode=mode)

    def forward_backward_batch(self, data: Any, forward_only: bool = False) -> Any:
        data(self.module[0])
        return {"metrics": {}}


Engine.forward_backward_batch = verl_engine.wrapped(  # type: ignore[method-assign]
    Engine.forward_backward_batch,
    verl_engine.Asked(lambda self: self.module, lambda self: self.settings, lambda self: None),
)


def record(engine: Engine) -> list[Any]:
    routes: list[Any] = []

    def schedule(model: ToyModel) -> None:
        switch.set(REPLAY)
        switch.set(RECORD)
        with torch.no_grad():
            model(tokens(0))
        tap, chunk = switch.recording(None, None, 0)
        routes.append(tap.take(chunk))
        switch.clear()

    engine.forward_backward_batch(schedule, forward_only=True)
    return routes


def replay(engine: Engine, routes: list[Any]) -> Any:
    def schedule(model: ToyModel) -> None:
        switch.set(REPLAY)
        feed, chunk = switch.replaying(None, None, 0)
        feed.give(chunk, routes[0])
        model(tokens(0)).sum().backward()
        switch.clear()

    return engine.forward_backward_batch(schedule)


def test_a_replayed_pass_says_once_that_it_is_on_and_adds_its_metrics(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine()
    with caplog.at_level("INFO", "npu_replay.job"):
        routes = record(engine)
        found = replay(engine, routes)
        replay(engine, routes)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith("[npu_replay] R2: 2 routers, 2 replayed")
    assert found["metrics"]["npu_replay/live_mismatch"] == [0.0]
    assert found["metrics"]["npu_replay/seconds"][0] > 0
    assert found["metrics"]["npu_replay/megabytes"] == [2 * ROWS * TOPK / 1e6]


def test_nothing_is_left_when_a_pass_raises() -> None:
    engine = Engine()

    def schedule(model: ToyModel) -> None:
        switch.set(RECORD)
        model(tokens(0))
        raise MemoryError

    with pytest.raises(MemoryError):
        engine.forward_backward_batch(schedule)
    assert not switch.action
    assert hooks(engine.module[0]) == 0


def test_an_action_doesnt_outlive_what_expected_it() -> None:
    with pytest.raises(ZeroDivisionError), switch.expecting():
        switch.set(RECORD)
        raise ZeroDivisionError
    assert not switch.action


def test_a_pass_without_an_action_is_left_alone() -> None:
    """A reference pass of the same engine."""
    engine = Engine()
    engine.forward_backward_batch(lambda model: model(tokens(0)), forward_only=True)
    assert hooks(engine.module[0]) == 0


def test_a_forward_without_routes_is_raised_when_the_pass_ends() -> None:
    engine = Engine()
    after: list[str] = []

    def schedule(model: ToyModel) -> None:
        switch.set(REPLAY)
        model(tokens(0)).sum().backward()
        after.append("went on")

    with pytest.raises(MicroBatchError, match="no routes were given"):
        engine.forward_backward_batch(schedule)
    assert after == ["went on"]


def test_an_engine_refuses_to_go_on_in_silence_after_uninstall() -> None:
    engine = Engine()
    record(engine)
    verl_engine.refuse_engines()
    with pytest.raises(ReplayError, match="uninstalled after this engine"):
        engine.forward_backward_batch(lambda model: None)


@pytest.mark.parametrize("told", ["often", "1 in 2"])
def test_a_setting_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    engine = Engine()
    routes = record(engine)
    monkeypatch.setenv("NPU_REPLAY_METRICS_EVERY", told)
    with pytest.raises(ReplayError, match="NPU_REPLAY_METRICS_EVERY must be a whole number"):
        replay(engine, routes)


@pytest.mark.parametrize(
    ("updates", "trains", "compares", "tolerant", "least"),
    [
        (0, True, True, False, None),
        (0, False, False, False, None),
        (1, True, False, True, 0),
        (10, True, True, True, 0),
    ],
)
def test_what_a_pass_checks_depends_on_the_updates_before_it(
    updates: int, trains: bool, compares: bool, tolerant: bool, least: float | None
) -> None:
    job = verl_engine.Pass([], "R3", verl_engine._Engine(updates=updates), trains)
    assert (job.compares(), job.tolerant, job.min_overlap()) == (compares, tolerant, least)


def test_an_fsdp_engine_whose_mode_lacks_its_key_is_refused() -> None:
    pytest.importorskip("transformers")
    from npu_replay.compat.verl import fsdp

    config = {"strategy": "fsdp2", "router_replay": {"mode": "R2"}}
    assert fsdp.settings_of(SimpleNamespace(engine_config=config)).mode == "R2"
    config["router_replay"] = "R2"
    with pytest.raises(ReplayError, match=r"Expected \S+router_replay.mode=R2"):
        fsdp.settings_of(SimpleNamespace(engine_config=config))
