"""Modules that a product lacks, under the names by which other releases of it have them.

A caller imports `megatron.core.transformer.moe.router_replay`, and the release that is here has no such
file. So a finder answers for the names that were asked to be served, and for no other, where the parent
package is the product's and no other finder has the module, neither one before it nor one that came after.
Nothing is made before somebody imports it.
"""

from __future__ import annotations

import functools
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from npu_replay import environment
from npu_replay.compat.patching import import_hook
from npu_replay.compat.patching.patches import Change, Patches, when_undone

Build = Callable[[Any], None]
"""Fills a new module: sets the names in it that the product's own would have."""


def serve(
    name: str, build: Build, why: str, *, reason: str = "", where: Callable[[], bool] = lambda: True
) -> None:
    """Let `name` be imported where the product has no module of that name. Twice is as good as once.

    >>> from npu_replay.compat.patching.served_modules import serve, withdraw
    >>> serve("json.newer", lambda module: setattr(module, "value", 1), "an example")
    >>> import json.newer
    >>> json.newer.value, withdraw("json.newer")
    (1, None)

    Args:
        name: in full, «megatron.core.transformer.moe.router_replay».
        build: called with the new module, once each time that it is made. What it raises, the import raises.
        why: what is done here, for the report: shown once the module is imported.
        reason: the capability that is missing without it, for the report; `name` if there is none.
        where: asked at each import: is this a release for which it is meant?
    """
    if environment.disabled():
        return
    _served.setdefault(name, _Served(name, build, why, where, Patches(reason or f"the names of {name}")))
    if _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


def withdraw(*names: str) -> None:
    """Serve these names no more, or none at all, and take the modules away that were made for them."""
    for name in names or tuple(_served):
        served = _served.pop(name, None)
        if served is not None:
            served.patches.undo()
    if not _served and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


@dataclass
class _Served:
    name: str
    build: Build
    why: str
    where: Callable[[], bool]
    patches: Patches
    made: ModuleType | None = None


_served: dict[str, _Served] = {}
when_undone(withdraw)


def _take_away(module: ModuleType) -> bool:
    """Take a module out of sys.modules and out of its package; what somebody else has put there stays."""
    name = module.__name__
    if getattr(module.__spec__, "loader", None) is not _finder:
        return True  # reloaded, and the product has it by now
    if sys.modules.get(name) is module:
        del sys.modules[name]
    package, _, child = name.rpartition(".")
    parent = sys.modules.get(package)
    if getattr(parent, child, None) is module:
        delattr(parent, child)
    return True


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is served, last of all finders, and loads it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        served = _served.get(fullname)
        if served is None or fullname in _asking.names or environment.disabled():
            return None
        parent = sys.modules.get(fullname.rpartition(".")[0])
        if getattr(parent, "__file__", None) is None or not served.where():
            return None  # a stand-in that somebody made by hand, or a bare folder: no product
        after = sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else []
        with _asking.about(fullname):
            found = (one.find_spec(fullname, path, target) for one in after if hasattr(one, "find_spec"))
            theirs = any(spec is not None for spec in found)  # whose finder is asked next
        return None if theirs else ModuleSpec(fullname, self, origin=__name__)

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        served = _served[module.__name__]
        served.build(module)
        if served.made is module and any(served.patches):
            return  # reloaded
        served.patches.undo()  # one that somebody took out of sys.modules
        served.made = module
        served.patches.add(Change(served.name, served.why, functools.partial(_take_away, module)))


_finder = _Finder()
_asking = import_hook.Asking()
