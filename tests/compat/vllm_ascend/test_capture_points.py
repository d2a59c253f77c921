"""What is looked for in a worker, on stand-ins: whose functions, and which layers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from npu_replay.compat.vllm_ascend import plugin
from npu_replay.compat.vllm_ascend.capture_points import layers, refuse_foreign, selectors
from npu_replay.errors import ReplayError

HOME = "vllm_ascend.ops.fused_moe.experts_selector"
HOLDER = "vllm_ascend.quantization.methods.w8a8_dynamic"


def written_in(file: str) -> Callable[..., Any]:
    """A function of that file."""
    made: dict[str, Any] = {}
    exec(compile("def select_experts(): ...", f"/site/{file}", "exec"), made)
    return made["select_experts"]  # type: ignore[no-any-return]


OWN = written_in("experts_selector.py")


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """vllm-ascend's home of the function, one that holds it, and somebody else's who does."""
    found = {name: ModuleType(name) for name in (HOME, HOLDER, "somebody.s")}
    for name, module in found.items():
        module.select_experts = OWN  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    return found


@functools.wraps(OWN)
def wrapped() -> None: ...


@pytest.mark.parametrize(
    ("where", "foreign"),
    [
        (HOME, written_in("my_patch.py")),
        (HOLDER, wrapped),
        (HOLDER, functools.partial(OWN)),
        (HOLDER, print),
    ],
    ids=["another file", "a wrapper", "a partial", "no Python"],
)
def test_somebody_elses_function_is_refused_where_it_stands(
    modules: dict[str, ModuleType], where: str, foreign: Any
) -> None:
    ((function, holders),) = selectors()
    assert function is OWN
    assert {one.__name__ for one in holders} == modules.keys()
    modules[where].select_experts = foreign  # type: ignore[attr-defined]
    with pytest.raises(ReplayError, match=rf"{where}\.select_experts: somebody else has replaced"):
        list(selectors())


def test_vllm_ascends_own_patch_of_the_capture_is_no_stranger() -> None:
    files = ("routed_experts_capturer", "routed_experts_capture")
    for file in ("routed_experts_capturer.py", "patch_routed_experts_capture.py"):
        refuse_foreign(written_in(file), files, "capture")
    with pytest.raises(ReplayError, match="another patch that captures routes: take it out"):
        refuse_foreign(written_in("patch_other.py"), files, "capture")


class Routes(torch.nn.Module):
    layer_id = property(lambda self: self.number)

    def __init__(self, number: int, zero_experts: int = 0) -> None:
        super().__init__()
        self.number = number
        self.moe_config = object()
        self.zero_expert_num = zero_experts


def test_two_modules_of_one_layer_are_refused() -> None:
    assert list(layers(torch.nn.Sequential(Routes(1), torch.nn.Linear(1, 1), Routes(3)))) == [1, 3]
    with pytest.raises(ReplayError, match="two modules route for layer 1"):
        layers(torch.nn.Sequential(Routes(1), Routes(1)))


def held(numbers: tuple[int, ...], columns: int = 4, zero_experts: int = 0) -> object:
    text = {"num_hidden_layers": 4, "num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [0]}
    runner = SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(hf_text_config=text)))
    routing = {number: Routes(number, zero_experts) for number in numbers}
    return plugin._held_against_config(runner, routing, torch.zeros(1, columns, 2))


def test_layers_are_held_against_the_models_config() -> None:
    assert held((1, 2, 3))
    for numbers, columns in (((1, 3), 4), ((0, 1, 2, 3), 4), ((1, 2, 3), 3)):
        with pytest.raises(ReplayError, match="the layers that route aren't those of the model's config"):
            held(numbers, columns)
    with pytest.raises(ReplayError, match=r"layers \[1, 2, 3\] choose experts that compute nothing"):
        held((1, 2, 3), zero_experts=2)
