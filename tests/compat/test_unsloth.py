"""Unsloth's compiler writes classes of transformers anew, in `unsloth_compiled_module_<family>`.

Here that is done by hand, as its release 2026.10.9 does it for Qwen3-MoE: the router's forward may be a
compiled function.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.qwen3_moe import modeling_qwen3_moe as stock

import npu_replay
from npu_replay.errors import RouterError
from zoo import qwen

if not hasattr(stock, "Qwen3MoeTopKRouter"):
    pytest.skip("transformers 4 has no class of the router", allow_module_level=True)

ROUTER = "Qwen3MoeTopKRouter"
BLOCK = "Qwen3MoeSparseMoeBlock"


def written_anew(name: str, classes: list[str]) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update({key: value for key, value in vars(stock).items() if not key.startswith("__")})
    for one in classes:
        exec(compile(inspect.getsource(getattr(stock, one)), name, "exec"), vars(made))
    return made


@pytest.fixture(params=[[ROUTER], [ROUTER, BLOCK, "compiled"]], ids="-".join)
def unsloth(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    classes = [one for one in request.param if one != "compiled"]
    made: Any = written_anew("unsloth_compiled_module_qwen3_moe", classes)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    for one in classes:
        monkeypatch.setattr(stock, one, getattr(made, one))
    if "compiled" in request.param:
        router = getattr(made, ROUTER)
        router.forward = torch.compile(router.forward, fullgraph=True, backend="eager")
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("unsloth")
def test_routers_that_were_written_anew_are_recorded_observed_and_replayed() -> None:
    made = qwen.make(vocabulary=64, layers=3)
    tokens = torch.randint(0, 64, (2, 10))
    with torch.no_grad(), npu_replay.record(made) as recording:
        made(tokens)
    assert recording.routes[0].layers == (0, 1, 2)
    for layer in made.model.layers:
        nn.init.normal_(layer.mlp.gate.weight)
    with npu_replay.observe(made) as live:
        made(tokens)
    with npu_replay.observe(made) as seen, npu_replay.replay(made, recording.routes):
        made(tokens).logits.sum().backward()
    assert npu_replay.compare(recording.routes, live.shown).router_mismatch > 0
    assert npu_replay.compare(recording.routes, seen.shown).router_mismatch == 0


def test_half_of_a_model_is_never_taken_for_it_all() -> None:
    """Whoever writes classes anew under a name that nobody knows, in some layers alone."""
    made = qwen.make(vocabulary=64, layers=3)
    other = written_anew("somebodys_compiler", [ROUTER, BLOCK])
    for layer in (0, 2):
        made.model.layers[layer].mlp = vars(other)[BLOCK](made.config)
    for opens in (npu_replay.record, npu_replay.observe, npu_replay.pin_recompute):
        with pytest.raises(RouterError) as caught, opens(made):  # type: ignore[attr-defined]
            pass
        assert caught.value.where == "model.layers.0.mlp"
        assert "somebodys_compiler.Qwen3MoeSparseMoeBlock" in str(caught.value)
