"""Which modules are worth asking is remembered until one is added, replaced, moved or removed."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from choice import examples
from npu_replay.module_tree import ModuleTree


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


@examples(200)
@given(data=st.data())
def test_any_change_is_noticed(data: st.DataObject) -> None:
    """A module is added, replaced, removed, moved or shared, deep inside or not, or its class is another."""
    made = model()
    for _ in range(3):
        assert linears(made) == named(made)
        modules = [*made.modules()]
        parent = modules[data.draw(st.integers(0, len(modules) - 1))]
        children = [None, nn.Linear(2, 2), *modules, *map(copy.deepcopy, modules)]
        how = data.draw(st.sampled_from(["class", "pop", "set"]))
        name = data.draw(st.sampled_from(["0", "1", "late"]))
        if how == "class":
            parent.__class__ = Bias
        elif how == "pop":
            parent._modules.pop(name, None)
        else:
            parent._modules[name] = children[data.draw(st.integers(0, len(children) - 1))]
    assert linears(made) == named(made)


def test_a_module_is_asked_once_and_again_after_an_error() -> None:
    """What leaves the modules in place asks nobody again."""
    made = model()
    asked = []

    def wanted(module: nn.Module, path: str) -> bool:
        asked.append(path)
        if len(asked) == 3:
            raise ValueError(path)
        return True

    with pytest.raises(ValueError, match=r"0\.0"):
        list(ModuleTree.of(made).where(wanted))
    first = list(ModuleTree.of(made).where(wanted))
    made.eval().double().requires_grad_(False)
    made[0][0].weight = nn.Parameter(made[0][0].weight * 2)
    made[0][0].forward = made[0][0].forward
    assert list(ModuleTree.of(made).where(wanted)) == first
    assert asked[3:] == [path for path, _ in made.named_modules()]


def test_a_tree_keeps_no_module_alive() -> None:
    made = model()
    made[2].parent = [made]  # a cycle, which waits for the garbage collector
    linears(made)
    tree = weakref.ref(ModuleTree.of(made))
    inner = weakref.ref(made[0][0])
    made[0][0] = nn.Linear(2, 2)
    assert inner() is None
    linears(made)
    assert tree() is None
    tree = weakref.ref(ModuleTree.of(made))
    del made
    gc.collect()
    assert tree() is None


def test_a_part_that_changes_places_with_an_absent_one_is_noticed() -> None:
    made = nn.Module()
    made.register_module("first", None)
    made.register_module("second", nn.Linear(2, 2))
    assert [path for path, _ in linears(made)] == ["second"]
    made.first, made.second = made.second, None
    assert linears(made) == named(made)
    assert [path for path, _ in linears(made)] == ["first"]
