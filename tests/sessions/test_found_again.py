"""A second block on a model sees what was changed in it since the first, though modules are remembered."""

from __future__ import annotations

import copy

import pytest
from torch import nn

from npu_replay import routers
from zoo.toys import (
    TOPK,
    ToyBlock,
    ToyLayer,
    ToyModel,
    ToyRouter,
    ToyRouters,
    opened,
    recorded,
    tokens,
)

pytestmark = pytest.mark.usefixtures("toy_routers")


def test_a_block_is_as_on_a_model_that_had_none_before() -> None:
    """Which changes of the tree are noticed: tests/test_module_tree.py."""
    model = ToyModel()
    recorded(model)
    model.layers.append(copy.deepcopy(model.layers[0]))
    for number, layer in enumerate(model.layers):
        layer.router.topk += 1
        layer.router.layer = 7 - number
    fresh = recorded(copy.deepcopy(model))
    assert recorded(model) == fresh
    assert (fresh[0].layers, fresh[0].topk) == ((5, 6, 7), TOPK + 1)


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
