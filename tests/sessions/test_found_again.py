"""A second block on a model sees what was changed in it since the first, though modules are remembered."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import npu_replay
from npu_replay import routers
from zoo.toys import (
    TOPK,
    ToyBlock,
    ToyLayer,
    ToyModel,
    ToyRouter,
    ToyRouters,
    foreign,
    opened,
    recorded,
    run,
    tokens,
)

pytestmark = pytest.mark.usefixtures("toy_routers")


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any) -> Any:
        return self.inner(*args)


def added(model: ToyModel) -> None:
    model.layers.append(copy.deepcopy(model.layers[0]))


def replaced(model: ToyModel) -> None:
    model.layers[0].router = ToyRouter()


def removed(model: ToyModel) -> None:
    del model.layers[0]


def moved(model: ToyModel) -> None:
    first, second = model.layers
    first.router, second.router = second.router, first.router


def wrapped(model: ToyModel) -> None:
    model.layers[0] = Wrapper(model.layers[0])
    model.layers[1].router = Wrapper(model.layers[1].router)


def another_forward(model: ToyModel) -> None:
    def turned(self: ToyRouter, hidden: torch.Tensor) -> Any:
        return ToyRouter.forward(self, -hidden)

    model.layers[0].router.forward = types.MethodType(turned, model.layers[0].router)


def another_topk(model: ToyModel) -> None:
    for layer in model.layers:
        layer.router.topk = TOPK + 1


def other_labels(model: ToyModel) -> None:
    for number, layer in enumerate(model.layers):
        layer.router.layer = 7 - number


CHANGES = [
    *(added, replaced, removed, moved, wrapped, another_forward, another_topk, other_labels),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_block_is_as_on_a_model_that_had_none_before(change: Callable[[ToyModel], None]) -> None:
    model = ToyModel()
    before = recorded(model)
    change(model)
    fresh = copy.deepcopy(model)
    routes = recorded(model)
    assert [one.layers for one in routes] == [one.layers for one in recorded(fresh)]
    assert npu_replay.compare(routes, recorded(fresh)).differing == 0
    given = foreign(layers=routes[0].layers) if change is not another_topk else routes
    results = []
    for one in (model, fresh):
        with npu_replay.replay(one, given), npu_replay.observe(one) as seen:
            results.append(run(one))
        assert npu_replay.compare(seen.shown, given).differing == 0
    assert results[0][0] == results[1][0]
    for ours, theirs in zip(results[0][1], results[1][1], strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)
    assert before[0].topk == TOPK


@pytest.mark.parametrize("kind", ["record", "replay", "pin_recompute"])
def test_the_second_block_asks_routers_alone(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ToyModel()
    asked = []

    class Narrow(ToyRouters):
        def may_be_router(self, module: nn.Module, path: str) -> bool:
            return isinstance(module, ToyRouter)

        def describe(self, module: nn.Module, path: str) -> routers.Router | None:
            asked.append(path)
            return super().describe(module, path)

    routers.register("toy", Narrow())
    for count in (1, 2):
        with opened(kind, model):
            model(tokens())
        assert asked == ["layers.0.router", "layers.1.router"] * count
        for walk in ("named_modules", "modules"):
            monkeypatch.setattr(nn.Module, walk, None)


def test_another_kind_of_the_same_name_is_asked_of_all_modules() -> None:
    class Gates(ToyRouters):
        def describe(self, module: nn.Module, path: str) -> routers.Router | None:
            return super().describe(module, path) if path.endswith("gate") else None

    model = ToyModel()
    model.layers[0].gate = ToyRouter()
    assert len(routers.find([model])[0]) == 3
    routers.register("toy", Gates())
    assert [router.path for router in routers.find([model])[0]] == ["layers.0.gate"]


def test_modules_inside_a_router_are_none_and_its_sisters_are() -> None:
    """A router's path may begin with another's: `layers.1` and `layers.10`."""
    model = ToyModel(*(ToyRouter() for _ in range(11)))
    for layer in model.layers:
        layer.router.inner = ToyRouter()
    model.layers[0].router2 = ToyRouter()
    found = [router.path for router in routers.find([model])[0]]
    assert found == [
        *("layers.0.router", "layers.0.router2"),
        *(f"layers.{number}.router" for number in range(1, 11)),
    ]


def test_routers_of_two_kinds_come_in_the_order_of_the_modules() -> None:
    """And the router of one kind that lies inside the router of another, registered later, is none."""
    model = nn.Sequential(ToyBlock(), ToyLayer(ToyRouter()), ToyBlock())
    model[2].gate = ToyRouter()
    found = routers.find([model])[0]
    assert [(router.path, router.label) for router in found] == [("0", 0), ("1.router", 1), ("2", 2)]
