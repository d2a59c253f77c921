"""Ceilings of the house, which may sink and never rise.

Each holds today's number. A change that makes one smaller lowers its ceiling; none is raised.
"""

from __future__ import annotations

import ast
import functools
import graphlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from torch import nn

from test_house import MODULES, imported, room_of, tree_of

LEVELS = 3
"""The most classes of ours above each other."""
ROOMS = {"seam", "sessions", "following"}
SESSION_LEVELS = 2
"""The same in ROOMS, which are put together of parts."""
TWICE = 2
"""Names that several classes have."""

TORCHS = {*vars(nn.Module()), "_version"}
"""Private attributes that are torch's own."""


@functools.cache  # when a test asks: who collects the tests reads no module
def trees() -> dict[str, ast.Module]:
    return {name: tree_of(path) for name, path in MODULES.items()}


def test_no_modules_need_each_other() -> None:
    """Also by what they import for type checkers alone."""
    needs = {name: imported(path, for_types=True) & MODULES.keys() for name, path in MODULES.items()}
    faces = {"npu_replay", "npu_replay.compat"}
    graphlib.TopologicalSorter({name: needs[name] - faces for name in needs}).prepare()


def test_private_parts_that_another_room_uses() -> None:
    used = {
        f"{module}: {ast.unparse(node)}"
        for module, node in private_parts_of_others(trees(), room_of)
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }
    assert used == set()


def private_parts_of_others(
    trees: dict[str, ast.Module], home: Callable[[str], str]
) -> Iterator[tuple[str, ast.Attribute]]:
    """Where a module uses a private part that no module of its own `home` defines, and another one does."""
    owners: dict[str, set[str]] = defaultdict(set)
    for module, tree in trees.items():
        for name in private_names(tree):
            owners[name].add(home(module))
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or not is_private(node.attr) or node.attr in TORCHS:
                continue
            if owners[node.attr] and home(module) not in owners[node.attr]:
                yield module, node


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_names(tree: ast.AST) -> Iterator[str]:
    """Private names that a module defines, as functions, classes, variables or attributes of self."""
    for node in ast.walk(tree):
        name = node.name if isinstance(node, ast.FunctionDef | ast.ClassDef) else ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr if ast.unparse(node.value) == "self" else ""
        if is_private(name):
            yield name


@functools.cache
def classes() -> dict[tuple[str, str], ast.ClassDef]:
    return {
        (module, node.name): node
        for module, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }


def test_levels_of_classes() -> None:
    """How far a class is from the first of ours that it inherits from, at most."""
    bases = defaultdict(set)
    for (_, name), node in classes().items():
        bases[name] |= {ast.unparse(base).rpartition(".")[2] for base in node.bases}

    def level(name: str) -> int:
        return 1 + max((level(base) for base in bases[name] & bases.keys() - {name}), default=0)

    deepest = max(bases, key=level)
    assert level(deepest) == LEVELS, deepest
    assert max(map(level, {name for module, name in classes() if room_of(module) in ROOMS})) == SESSION_LEVELS


def test_sessions_are_put_together_of_parts() -> None:
    """Who reads one file of these rooms needs no private part of another."""
    of_rooms = {module: tree for module, tree in trees().items() if room_of(module) in ROOMS}
    used = private_parts_of_others(of_rooms, lambda module: module)
    assert {f"{module}: {ast.unparse(node)}" for module, node in used} == set()


def test_class_names_that_mean_two_things() -> None:
    twice = [name for name, count in Counter(name for _, name in classes()).items() if count > 1]
    assert len(twice) == TWICE, sorted(twice)
