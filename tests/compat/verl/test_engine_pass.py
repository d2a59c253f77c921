"""A pass of an engine, without verl: what is opened, settled and left, on a small model in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from npu_replay import routers
from npu_replay.compat.verl.batch_routes import are_refused, refused_rows
from npu_replay.compat.verl.engine_adapter import EngineAdapter
from npu_replay.compat.verl.engine_pass import RECORD, EnginePass, current
from zoo.toys import ToyModel, ToyRouters, hooks, tokens


@pytest.fixture(autouse=True)
def toy_routers() -> Iterator[None]:
    routers.register("toys", ToyRouters())
    yield
    routers.unregister("toys")
    assert current().engine is None
    assert not current().action


class Engine:
    """What a pass asks of verl's engine."""

    engine_config = SimpleNamespace(router_replay=SimpleNamespace(mode="R2"))

    def __init__(self) -> None:
        self.module = [ToyModel()]


def test_nothing_is_left_when_a_pass_raises() -> None:
    """Nor of what was set inside it, in the pass around it; a pass may have no engine."""
    engine = Engine()
    for adapter in (EngineAdapter(engine), None):
        with EnginePass().entered():
            with pytest.raises(MemoryError), EnginePass(adapter).entered():
                current().set(RECORD)
                engine.module[0](tokens(0))
                raise MemoryError
            assert not current().action
    assert hooks(engine.module[0]) == 0


class Acting(EngineAdapter):
    """As verl's FSDP engines, whose verl sets no action."""

    acts = True


@pytest.mark.parametrize(("flagged", "action"), [(True, RECORD), (False, "")])
def test_an_engine_that_acts_by_itself_does_so_in_marked_passes_alone(flagged: bool, action: str) -> None:
    engine = Engine()
    with EnginePass(Acting(engine), flagged=flagged).entered() as running:
        assert (running.action, bool(running.session)) == (action, flagged)
        with torch.no_grad():
            engine.module[0](tokens(0))


def test_an_update_counts_the_time_of_the_passes_before_it_once() -> None:
    engine = Engine()
    adapter = EngineAdapter(engine)
    for trains in (False, True):
        with EnginePass().entered(), torch.no_grad():
            current().set(RECORD)
            with EnginePass(adapter, trains=trains).entered():
                engine.module[0](tokens(0))
        assert bool(adapter.microseconds) == (not trains)


def test_rows_of_a_refused_sample_are_no_row_of_any_model() -> None:
    models = ((1, 256, np.uint8), (1, 512, np.int16), (8, 64, np.uint8), (8, 256, np.uint8))
    for topk, experts, dtype in models:
        rows = torch.from_numpy(refused_rows(3, np.empty((0, 2, topk), dtype)))
        assert are_refused(rows, experts)
        assert are_refused(rows.to(torch.int64), experts)
        assert not are_refused(torch.zeros_like(rows), experts)
    right = torch.full((3, 2, 1), 255, dtype=torch.uint8)
    assert not are_refused(right, 256)
