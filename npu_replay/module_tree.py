"""Remember which modules of a model are worth asking, so that finding its routers doesn't ask all of them.

A model with 128 experts a layer has 25,000 modules, and a trainer opens a block for every mini-batch. What is
remembered are modules, never an answer: who takes a list from here asks each module in it anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import nn

Wanted: TypeAlias = Callable[[nn.Module, str], bool]
"""Decides by a module's class, its parts, its path and the names of its attributes, not by their values."""


class ModuleTree:
    """Knows the modules of a model as they are now. `ModuleTree.of` gives the one of a model that is alive.

    Attributes:
        shape: equal to another one if every module of the model is the same, of the same class, and in the
            same place.
    """

    def __init__(self, model: nn.Module, shape: object) -> None:
        self.shape = shape
        # Weak: the tree must not keep alive the model that it is kept for.
        self._model = weakref.ref(model)
        named = enumerate(model.named_modules())
        self._places: list[tuple[int, str, Any]] = [
            (at, path, weakref.ref(module)) for at, (path, module) in named
        ]
        self._kept: dict[Wanted, list[tuple[int, str, Any]]] = {}

    @classmethod
    def of(cls, model: nn.Module) -> ModuleTree:
        """Return the remembered tree of a model, or another one if its shape has changed since."""
        shape = _shape(model)
        tree = _trees.get(model)
        if tree is None or tree.shape != shape:
            tree = _trees[model] = cls(model, shape)
        return tree

    @property
    def model(self) -> Any:
        return self._model()

    def where(self, wanted: Wanted) -> Iterator[tuple[int, str, Any]]:
        """Yield place, path and module where `wanted` is true, in the order of `named_modules()`.

        `wanted` is called once for each module of a tree.
        """
        if wanted not in self._kept:
            self._kept[wanted] = [place for place in self._places if wanted(place[2](), place[1])]
        # One at a time: a list of 25,000 tuples would start Python's garbage collection.
        for at, path, module in self._kept[wanted]:
            yield at, path, module()


_trees: weakref.WeakKeyDictionary[nn.Module, ModuleTree] = weakref.WeakKeyDictionary()


def _shape(model: nn.Module) -> object:
    """Return all modules and classes, and the names of their parts, in a third of `model.modules()`' time."""
    modules = [model]
    names: list[int | str] = []
    seen = set()
    for at, module in enumerate(modules):  # which grows
        parts = module._modules
        if parts and module not in seen:
            seen.add(module)
            names.append(at)
            present = {name: part for name, part in parts.items() if part is not None}
            names += present
            modules += present.values()
    return names, [*map(weakref.ref, modules)], [*map(type, modules)]


def way(model: nn.Module, path: str) -> Iterator[nn.Module]:
    """Yield the modules that contain the one at `path`, from the model on, and that one."""
    yield model
    for name in path.split(".") if path else ():
        model = model.get_submodule(name)
        yield model
