"""What routes stays as it was inside a block: a router that is replaced, or loses its hooks, is told.

A second block asks routers alone, since modules are remembered.
"""

from __future__ import annotations

import copy
import gc
import itertools
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
from npu_replay.errors import RouterError
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
REPLACED = "the code that routes was replaced inside an open block"


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


def swapped_routers(model: ToyModel) -> None:
    first, second = model.layers
    first.router, second.router = second.router, first.router


def wrapped_past_its_call(model: ToyModel) -> None:
    model.layers[0].router = Wrapper(model.layers[0].router, calls=False)


def forward_of_the_class(model: ToyModel) -> None:
    del model.layers[0].router.forward


def forward_of_the_instance(model: ToyModel) -> None:
    one = model.layers[0].router
    original = one.forward
    one.forward = lambda hidden: original(hidden)


def other_dictionaries(model: ToyModel) -> None:
    for module in model.modules():
        module._forward_pre_hooks = OrderedDict()
        module._forward_hooks = OrderedDict()


REPLACING = [router, swapped_routers]
UNHOOKING = [forward_of_the_class, forward_of_the_instance, other_dictionaries]


def forward(model: ToyModel, number: int) -> torch.Tensor:
    return (model(tokens(number).requires_grad_()).sin() * (number + 1)).square().mean()


def gradients(model: ToyModel) -> dict[str, torch.Tensor]:
    """By the names that parameters have without wrappers."""
    found = {name.replace("inner.", ""): one.grad for name, one in model.named_parameters()}
    return {name: one.clone() for name, one in found.items() if one is not None}


def untouched(kind: str, how: str | None, count: int = 2) -> dict[str, torch.Tensor]:
    model = ToyModel(Detached(), Detached(), recompute=how)
    with opened(kind, model, count):
        sum(forward(model, number) for number in range(count)).backward()
    return gradients(model)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)


# Between a forward and its recompute


@pytest.mark.choice
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("change", [*REPLACING, *UNHOOKING, wrapped_past_its_call])
def test_what_is_replaced_between_a_forward_and_its_recompute_stops_backward(
    change: Change, how: str, kind: str
) -> None:
    model = ToyModel(Detached(), Detached(), recompute=how)
    ended = False
    with (
        pytest.raises(RouterError, match=rf"micro-batch 1, in backward, .*{REPLACED}"),
        opened(kind, model, 2),
    ):
        losses = [forward(model, number) for number in range(2)]
        change(model)
        sum(losses).backward()
        ended = True
    assert not ended, "backward itself says it, before an optimizer steps"
    assert not any(parameter.grad is not None for parameter in model.parameters())


# Before a forward, and at the end


@pytest.mark.choice
@pytest.mark.parametrize(
    ("change", "kind"),
    [*itertools.product([*REPLACING, forward_of_the_class], KINDS), (router, "observe")],
)
def test_what_is_replaced_before_a_forward_is_told_at_its_beginning(change: Change, kind: str) -> None:
    model = ToyModel()
    session = opened(kind, model, 2)
    reached = []
    both = r"zoo\.toys\.ToyRouter, got another zoo\.toys\.ToyRouter" if change in REPLACING else ".*"
    words = rf"micro-batch 1, .*{REPLACED}\. Expected {both}\. Usual cause: .*merged"
    with pytest.raises(RouterError, match=words), session:
        forward(model, 0)
        change(model)
        model.layers[1].register_forward_pre_hook(lambda *_: reached.append(1))
        forward(model, 1)
    assert not reached


@pytest.mark.choice
@pytest.mark.parametrize(
    ("change", "kind"),
    [
        *itertools.product([swapped_routers, *UNHOOKING], KINDS),
        *itertools.product([router, other_dictionaries], ["observe"]),
    ],
)
def test_what_is_replaced_after_the_last_forward_is_told_on_leaving(change: Change, kind: str) -> None:
    model = ToyModel()
    session = opened(kind, model, 2)
    with pytest.raises(RouterError, match=rf"at the end of the block, .*{REPLACED}"), session:
        for number in range(2):
            forward(model, number).backward()
        change(model)


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
    with pytest.raises(RouterError, match=rf"micro-batch 2, layers\.0\.inner\.router: {REPLACED}"):  # noqa: SIM117
        with npu_replay.record(model):
            model(tokens(0))
            model.layers[0] = Wrapper(inner)
            model(tokens(1))
            model.layers[0].inner = copy.deepcopy(inner)
            model(tokens(2))


def other_class(model: ToyModel) -> None:
    one = model.layers[0].router
    one.__class__ = type("Sharded", (type(one),), {})


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
    found = {name: one.grad for name, one in weights.items() if one.grad is not None}
    assert same(found, untouched(kind, how))


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


@pytest.mark.parametrize("at", [3, 4])  # one that isn't checked, and one that is
def test_a_class_that_is_patched_in_a_block_runs_as_it_is_then(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ToyModel()
    native = ToyRouter.forward
    calls = []

    def patched(self: ToyRouter, hidden: torch.Tensor) -> Any:
        calls.append(self)
        return native(self, hidden)

    with torch.no_grad(), npu_replay.record(model):
        for number in range(6):
            if number == at:
                copied = copy.deepcopy(model)
                monkeypatch.setattr(ToyRouter, "forward", patched)
            model(tokens(number))
    copied(tokens())
    assert len(calls) == (6 - at + 1) * len(model.layers)


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
    found = [router.path for router in routers.find([model])[0]]
    assert found == [
        *("layers.0.router", "layers.0.router2"),
        *(f"layers.{number}.router" for number in range(1, 11)),
    ]


def test_routers_of_two_kinds_come_in_the_order_of_the_modules_or_of_their_layers() -> None:
    """And the router of one kind that lies inside the router of another, registered later, is none."""
    model = nn.Sequential(ToyBlock(), ToyLayer(ToyRouter()), ToyBlock())
    model[2].gate = ToyRouter()
    found = routers.find([model])[0]
    assert [(router.path, router.label) for router in found] == [("0", 0), ("1.router", 1), ("2", 2)]
    by_label = routers.find([ToyModel(ToyRouter(layer=4), ToyRouter(layer=3))])[0]
    assert [router.label for router in by_label] == [3, 4]
