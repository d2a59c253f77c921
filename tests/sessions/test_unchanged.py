"""What happens to routers inside a block: one that is replaced before a forward is told.

A second block asks routers alone, since modules are remembered.
"""

from __future__ import annotations

import copy
import gc
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import npu_replay
from npu_replay import routers
from npu_replay.errors import NoEffect, ReplayError
from npu_replay.seam import backward
from zoo.toys import (
    ToyBlock,
    ToyLayer,
    ToyModel,
    ToyRouter,
    ToyRouters,
    opened,
    plain,
    tokens,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.usefixtures("toy_routers"),
]

KINDS = ["record", "replay", "pin_recompute"]
HOW = ["reentrant", "non-reentrant"]
Change = Callable[[ToyModel], None]


class Detached(ToyRouter):
    """Chooses otherwise in a recompute, and saves for backward what a router in a block does: torch's own
    check of a checkpoint sees no difference."""

    def __init__(self) -> None:
        super().__init__(select=self._choose_detached)

    def _choose_detached(self, _: ToyRouter, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ids = plain(self, scores.detach() * (-1 if backward.in_backward() else 1))[1]
        return scores.gather(1, ids), ids


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module, calls: bool = True) -> None:
        super().__init__()
        self.inner = inner
        self.calls = calls

    def forward(self, *args: Any) -> Any:
        return self.inner(*args) if self.calls else self.inner.forward(*args)


def router(model: ToyModel) -> None:
    model.layers[0].router = copy.deepcopy(model.layers[0].router)


def forward_of_the_class(model: ToyModel) -> None:
    del model.layers[0].router.forward


def other_dictionaries(model: ToyModel) -> None:
    for module in model.modules():
        module._forward_pre_hooks = OrderedDict()
        module._forward_hooks = OrderedDict()


def forward(model: ToyModel, number: int) -> torch.Tensor:
    return (model(tokens(number).requires_grad_()).sin() * (number + 1)).square().mean()


def gradients(model: ToyModel) -> dict[str, torch.Tensor]:
    """By the names that parameters have without wrappers."""
    grads = {name.replace("inner.", ""): weight.grad for name, weight in model.named_parameters()}
    return {name: grad.clone() for name, grad in grads.items() if grad is not None}


def untouched(kind: str, how: str | None, count: int = 2) -> dict[str, torch.Tensor]:
    model = ToyModel(Detached(), Detached(), recompute=how)
    with opened(kind, model, count):
        sum(forward(model, number) for number in range(count)).backward()
    return gradients(model)


def same(grads: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return grads.keys() == expected.keys() and all(torch.equal(grads[name], expected[name]) for name in grads)


# Before a forward


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [router, forward_of_the_class, other_dictionaries])
def test_what_is_replaced_before_a_forward_ends_the_block(change: Change, kind: str) -> None:
    model = ToyModel()
    words = r"micro-batch 3, layer 0( .*was not called|: a router ran, but not through the __call__)"
    with pytest.raises(ReplayError, match=words), opened(kind, model, 4):
        for number in range(3):
            forward(model, number).backward()
        change(model)
        forward(model, 3)


# What is no replacement


@pytest.mark.choice
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [None, *HOW])
@pytest.mark.parametrize("of", ["router", "layer", "layers"])
def test_a_wrapper_that_comes_before_a_forward_and_calls_the_router_is_fine(
    of: str, how: str, kind: str
) -> None:
    model = ToyModel(Detached(), Detached(), recompute=how)
    with opened(kind, model, 4):
        losses = [forward(model, number) for number in range(3)]
        if of == "router":
            model.layers[0].router = Wrapper(model.layers[0].router)
        elif of == "layer":
            model.layers[0] = Wrapper(model.layers[0])
        else:
            model.layers = nn.ModuleList(map(Wrapper, model.layers))
        sum([*losses, forward(model, 3)]).backward()
    assert same(gradients(model), untouched(kind, how, 4))


def test_what_is_replaced_in_a_wrapper_is_told() -> None:
    model = ToyModel()
    inner = model.layers[0]
    with pytest.raises(NoEffect, match=r"micro-batch 2, layer 0 .*was not called"), npu_replay.record(model):
        model(tokens(0))
        model.layers[0] = Wrapper(inner)
        model(tokens(1))
        model.layers[0].inner = copy.deepcopy(inner)
        model(tokens(2))


def other_class(model: ToyModel) -> None:
    module = model.layers[0].router
    module.__class__ = type("Sharded", (type(module),), {})


def parametrized(model: ToyModel) -> None:
    parametrize.register_parametrization(model.layers[0].router, "weight", nn.Identity())


def no_hooks_of_the_router(model: ToyModel) -> None:
    model.layers[0].router._forward_pre_hooks.clear()
    model.layers[0].router._forward_hooks.clear()


def same_weights(model: ToyModel) -> None:
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    model.to(torch.float32).train()


@pytest.mark.choice
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [None, *HOW])
@pytest.mark.parametrize(
    "change",
    [other_class, parametrized, no_hooks_of_the_router, same_weights],
)
def test_what_leaves_the_router_where_it_is_changes_nothing(
    change: Change, how: str | None, kind: str
) -> None:
    """As FSDP2 does with classes, and parametrizations with weights."""
    if change is same_weights and how == "non-reentrant":
        pytest.skip("torch itself refuses weights that were written into since the forward")
    model = ToyModel(Detached(), Detached(), recompute=how)
    weights = dict(model.named_parameters())
    with opened(kind, model, 2):
        losses = [forward(model, number) for number in range(2)]
        if how is not None:
            change(model)
        sum(losses).backward()
        if how is None:
            change(model)
    grads = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    assert same(grads, untouched(kind, how))


# Nothing is left


@pytest.mark.parametrize("how", HOW)
def test_a_graph_that_outlives_its_block_asks_nobody_and_keeps_no_model(how: str) -> None:
    model = ToyModel(recompute=how)
    with npu_replay.pin_recompute(model) as session:
        loss = forward(model, 0)
        loss.backward(retain_graph=True)
    router(model)
    if how == "reentrant":
        loss.backward()
    gone = weakref.ref(session)
    del session
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("has_own", [False, True])
def test_a_routers_forward_is_what_it_was_when_the_block_has_ended(has_own: bool) -> None:
    model = ToyModel()
    router = model.layers[0].router
    if has_own:
        router.forward = types.MethodType(type(router).forward, router)
    before = vars(router).get("forward")
    with npu_replay.record(model):
        model(tokens())
        assert vars(router)["forward"] is not before
    assert ("forward" in vars(router)) == has_own
    assert vars(router).get("forward") is before


# Between two blocks


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
    paths = [router.path for router in routers.find([model])[0]]
    assert paths == [
        *("layers.0.router", "layers.0.router2"),
        *(f"layers.{number}.router" for number in range(1, 11)),
    ]


def test_routers_of_two_kinds_come_in_the_order_of_the_modules_or_of_their_layers() -> None:
    """And the router of one kind that lies inside the router of another, registered later, is none."""
    model = nn.Sequential(ToyBlock(), ToyLayer(ToyRouter()), ToyBlock())
    model[2].gate = ToyRouter()
    in_order = routers.find([model])[0]
    assert [(router.path, router.label) for router in in_order] == [("0", 0), ("1.router", 1), ("2", 2)]
    by_label = routers.find([ToyModel(ToyRouter(layer=4), ToyRouter(layer=3))])[0]
    assert [router.label for router in by_label] == [3, 4]
