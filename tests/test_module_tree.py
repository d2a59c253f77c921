"""Which modules are worth asking is remembered until one is added, replaced, moved or removed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
from torch import nn
from torch.nn.utils import parametrize

from npu_replay.module_tree import ModuleTree, way


class Bias(nn.Linear):
    """Stands for the class that FSDP2 gives a module in place."""


def model() -> nn.Module:
    made = nn.Sequential(
        nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Sequential(nn.Linear(2, 2)), nn.Module()
    )
    made.register_module("none", None)
    return made


def is_linear(module: nn.Module, path: str) -> bool:
    return isinstance(module, nn.Linear)


def linears(of: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path, module) for _, path, module in ModuleTree.of(of).where(is_linear)]


def named(of: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(path, module) for path, module in of.named_modules() if is_linear(module, path)]


def added(made: nn.Module) -> None:
    made.late = nn.Linear(2, 2)


def added_deep_inside(made: nn.Module) -> None:
    made[2].late = nn.Linear(2, 2)


def replaced(made: nn.Module) -> None:
    made[0][0] = nn.Linear(2, 2)


def replaced_by_a_copy(made: nn.Module) -> None:
    made[0] = copy.deepcopy(made[0])


def removed(made: nn.Module) -> None:
    del made[1]


def set_to_none(made: nn.Module) -> None:
    made[1].register_module("0", None)


def wrapped(made: nn.Module) -> None:
    made[0][0] = nn.Sequential(made[0][0])


def moved(made: nn.Module) -> None:
    made[2].inner = made[0][0]
    del made[0][0]


def moved_to_a_like_place(made: nn.Module) -> None:
    """Nothing but the parent is another one: the same names and modules in the same order."""
    made[2]._modules, made[1]._modules = made[1]._modules, made[2]._modules


def renamed(made: nn.Module) -> None:
    made[1].other = made[1]._modules.pop("0")


def swapped(made: nn.Module) -> None:
    made[0][0], made[1][0] = made[1][0], made[0][0]


def reordered(made: nn.Module) -> None:
    made._modules["0"] = made._modules.pop("0")


def shared(made: nn.Module) -> None:
    made[1][0] = made[0][0]


def another_class(made: nn.Module) -> None:
    made[0][1].__class__ = Bias


def parametrized(made: nn.Module) -> None:
    parametrize.register_parametrization(made[0][0], "weight", nn.Linear(2, 2))


CHANGES = [
    *(added, added_deep_inside, replaced, replaced_by_a_copy, removed, set_to_none, wrapped, moved),
    *(moved_to_a_like_place, renamed, swapped, reordered, shared, another_class, parametrized),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change: Callable[[nn.Module], None]) -> None:
    made = model()
    assert linears(made) == named(made)
    before = ModuleTree.of(made)
    change(made)
    assert ModuleTree.of(made) is not before
    assert linears(made) == named(made)


def test_what_leaves_the_modules_in_place_asks_nobody_again() -> None:
    made = model()
    asked = []

    def wanted(module: nn.Module, path: str) -> bool:
        asked.append(path)
        return bool(path)

    first = list(ModuleTree.of(made).where(wanted))
    made.eval().double().requires_grad_(False)
    made[0][0].weight = nn.Parameter(made[0][0].weight * 2)
    made[0][0].forward = made[0][0].forward
    assert list(ModuleTree.of(made).where(wanted)) == first
    assert asked == [path for path, _ in made.named_modules()]


def test_after_an_error_all_are_asked_again() -> None:
    made = model()
    asked = []

    def wanted(module: nn.Module, path: str) -> bool:
        asked.append(path)
        if len(asked) == 3:
            raise ValueError(path)
        return True

    with pytest.raises(ValueError, match=r"0\.0"):
        list(ModuleTree.of(made).where(wanted))
    assert [path for _, path, _ in ModuleTree.of(made).where(wanted)] == [
        path for path, _ in made.named_modules()
    ]


def test_a_tree_keeps_no_module_alive() -> None:
    made = model()
    made[2].parent = [made]  # a cycle, which waits for the garbage collector
    linears(made)
    tree = weakref.ref(ModuleTree.of(made))
    inner = weakref.ref(made[0][0])
    replaced(made)
    assert inner() is None
    linears(made)
    assert tree() is None
    tree = weakref.ref(ModuleTree.of(made))
    del made
    gc.collect()
    assert tree() is None


def test_modules_in_a_circle_are_walked_once() -> None:
    made = model()
    made[2].outer = made
    assert linears(made) == named(made)


def test_the_way_to_a_module() -> None:
    made = model()
    assert [*way(made, "0.1")] == [made, made[0], made[0][1]]
    assert [*way(made, "")] == [made]
