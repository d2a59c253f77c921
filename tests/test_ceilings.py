"""Ceilings of the house, which may sink and never rise.

Each holds today's number. A change that makes one smaller lowers its ceiling; none is raised.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from torch import nn

from test_house import MODULES, imported, room_of, tree_of

CIRCLES = 0
"""Modules in circles."""
PRIVATE = 0
"""Places where a room uses a private part of another."""
LEVELS = 3
"""The most classes of ours above each other."""
ROOMS = {"seam", "sessions", "following"}
SESSION_LEVELS = 2
"""The same in ROOMS, which are put together of parts."""
OVERRIDES = 3
"""The most classes of ROOMS that override one method."""
TWICE = 2
"""Names that several classes have."""

TORCHS = {*vars(nn.Module()), "_version"}
"""Private attributes that are torch's own."""


@functools.cache  # when a test asks: who collects the tests reads no module
def trees() -> dict[str, ast.Module]:
    return {name: tree_of(path) for name, path in MODULES.items()}


def test_modules_that_need_each_other() -> None:
    """Circles, with what is imported for type checkers alone."""
    needs = {module: {one for one in all_imported(module) if one in MODULES} for module in MODULES}
    circles = [circle for circle in components(needs) if len(circle) > 1]
    assert sum(map(len, circles)) == CIRCLES, circles


def all_imported(module: str) -> set[str]:
    """Every module that one imports, also under TYPE_CHECKING."""
    found = imported(MODULES[module])
    for node in ast.walk(tree_of(MODULES[module])):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for one in ast.walk(node):
                if isinstance(one, ast.ImportFrom):
                    names = {f"{one.module}.{alias.name}" for alias in one.names}
                    found |= {name if name in MODULES else str(one.module) for name in names}
    return found - {"npu_replay", "npu_replay.compat"}


def components(needs: dict[str, set[str]]) -> Iterator[set[str]]:
    """Modules that reach each other, by way of what each needs."""
    reached = {module: reachable(needs, module) for module in needs}
    done: set[str] = set()
    for module in needs:
        if module not in done:
            circle = {module} | {one for one in reached[module] if module in reached[one]}
            done |= circle
            yield circle


def reachable(needs: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for one in needs[waiting.pop()] - found:
            found.add(one)
            waiting.append(one)
    return found


def test_private_parts_that_another_room_uses() -> None:
    used = {
        f"{module}: {ast.unparse(node)}"
        for module, node in private_parts_of_others(trees(), room_of)
        if not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }
    assert len(used) == PRIVATE, sorted(used)


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
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and is_private(node.name):
            yield node.name
        targets = (
            node.targets
            if isinstance(node, ast.Assign)
            else [node.target]
            if isinstance(node, ast.AnnAssign)
            else []
        )
        for target in targets:
            for one in ast.walk(target):
                if (
                    isinstance(one, ast.Attribute)
                    and is_private(one.attr)
                    and ast.unparse(one.value) == "self"
                ):
                    yield one.attr
                elif isinstance(one, ast.Name) and is_private(one.id):
                    yield one.id


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
    names = set(bases)

    def level(name: str) -> int:
        return 1 + max((level(base) for base in bases[name] & names - {name}), default=0)

    deepest = max(names, key=level)
    assert level(deepest) == LEVELS, deepest


def test_sessions_are_put_together_of_parts() -> None:
    """Who reads one file of these rooms needs no private part of another, and no long line of ancestors."""
    of_rooms = {module: tree for module, tree in trees().items() if room_of(module) in ROOMS}
    ours = {name: node for (module, name), node in classes().items() if module in of_rooms}
    bases = {name: {ast.unparse(base) for base in node.bases} & set(ours) for name, node in ours.items()}
    methods = {
        name: {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
        for name, node in ours.items()
    }

    def above(name: str) -> set[str]:
        return bases[name].union(*map(above, bases[name]))

    levels = {name: 1 + len(above(name)) for name in ours}
    assert max(levels.values()) == SESSION_LEVELS, levels
    overridden = Counter(
        (base, method)
        for name in ours
        for base in above(name)
        for method in methods[name] & methods[base]
        if not method.startswith("__")
    )
    assert max(overridden.values()) <= OVERRIDES, overridden.most_common(3)
    used = private_parts_of_others(of_rooms, lambda module: module)
    assert {f"{module}: {ast.unparse(node)}" for module, node in used} == set()


def test_class_names_that_mean_two_things() -> None:
    twice = [name for name, count in Counter(name for _, name in classes()).items() if count > 1]
    assert len(twice) == TWICE, sorted(twice)
