"""Passes of an engine whose npu_replay is uninstalled and installed again, in one process."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import npu_replay
from npu_replay.compat.verl import install as verl
from npu_replay.compat.verl.engine_adapter import EngineAdapter
from npu_replay.compat.verl.engine_pass import wrapped
from npu_replay.errors import ReplayError


class Engine:
    """An engine whose schedule is over at once."""

    def __init__(self) -> None:
        self.passes = 0
        self.module: list[Any] = []
        self.engine_config = SimpleNamespace(router_replay=SimpleNamespace(mode="R2"))

    def forward_backward_batch(self, data: Any, forward_only: bool = False) -> Any:
        self.passes += 1
        return {"metrics": {}}


Engine.forward_backward_batch = wrapped(Engine.forward_backward_batch, EngineAdapter)  # type: ignore[method-assign]


def test_an_engine_that_uninstall_stopped_goes_on_after_install() -> None:
    """Its routers are as npu_replay has built them: nothing else of it has to be done again."""
    from verl.utils.megatron import router_replay_patch  # noqa: F401  without it there is nothing to install

    engine = Engine()
    engine.forward_backward_batch(None)
    npu_replay.uninstall()
    with pytest.raises(ReplayError, match="uninstalled after this engine"):
        engine.forward_backward_batch(None)
    npu_replay.install()
    engine.forward_backward_batch(None)
    assert engine.passes == 2
    npu_replay.uninstall()
    with pytest.raises(ReplayError, match="uninstalled after this engine"):
        engine.forward_backward_batch(None)
    npu_replay.install()


def test_an_engine_stays_stopped_where_install_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.utils.megatron import router_replay_patch

    engine = Engine()
    engine.forward_backward_batch(None)
    npu_replay.uninstall()
    with monkeypatch.context() as patch:
        patch.delattr(router_replay_patch, "RouterReplayAction")
        npu_replay.install()
        with pytest.raises(ReplayError, match="uninstalled after this engine"):
            engine.forward_backward_batch(None)
        assert verl._given_up
        npu_replay.uninstall()
    npu_replay.install()
    engine.forward_backward_batch(None)
