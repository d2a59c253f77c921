"""Waits for a module that others import, and makes one that a product lacks.

npu_replay imports no framework: the order of imports changes what MindSpeed patches. So changes to one wait
for its import. A module that a release lacks (`megatron.core.transformer.moe.router_replay`) is made when its
package is imported, unless a finder has the module.

Asks:     the other finders, for the names that somebody waits for or serves, and for no other.
Changes:  the loader of such a module for one import; sys.modules and the package where one is made.
Undone:   by `forget` and, for modules that were made, by `patches.undo_all`.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from npu_replay import environment
from npu_replay.compat.patching.patches import Change, Patches, turn
from npu_replay.errors import ReplayError

logger = logging.getLogger(__name__)

Shim = Callable[[Any], object]
"""Changes a module that was just imported, or fills one that is made; undoes its part if it raises."""


_waiting: dict[str, dict[str, tuple[Shim, bool, bool]]] = {}
"""What waits for a module, by the module's name and its own: the shim, `early` and `ends`."""
_failures: dict[str, str] = {}
_unusable: list[ReplayError] = []
"""Errors of the environment that are raised when a block is opened."""

MEANING = "A job that doesn't ask for replay goes on; one that asks is refused when its engine is built"
"""Says in the log what a failure means for the job."""


# ---- the interface


def when_imported(module: str, name: str, shim: Shim, *, early: bool = False, ends: bool = False) -> None:
    """Call `shim(module)` when `module` is imported, or now if it is; messages call it `name`.

    It turns npu_replay on, where an uninstall() has turned it off.

    With NPU_REPLAY_DISABLE=on nothing is done. A shim that raises is logged as an ERROR; the import goes on,
    and the first block is refused (`refuse_failures`).

    >>> from npu_replay.compat.patching.import_hook import when_imported
    >>> when_imported("json", "an example", lambda module: print("told of", module.__name__))
    told of json

    Args:
        early: call it before the code of `module` runs, with what is there of it; so shims are imported.
        ends: the import fails with the shim, for a process that opens no block.
    """
    if not environment.disabled():
        turn(True)
        _waiting.setdefault(module, {})[name] = shim, early, ends
        if _finder not in sys.meta_path:
            sys.meta_path.insert(0, _finder)
        _run_if_there(module)


def serve(name: str, fill: Shim, why: str, reason: str) -> None:
    """Make a module `name` when its package is imported, where the product has none.

    >>> from npu_replay.compat.patching.import_hook import serve
    >>> serve("json.newer", lambda module: setattr(module, "value", 1), "its why", "an example")
    >>> import json.newer
    >>> json.newer.value
    1

    Args:
        name: in full, «megatron.core.transformer.moe.router_replay».
        fill: called with the new module.
        why: what is done here, for the report.
        reason: the capability that is missing without it, for the report.
    """
    package, _, child = name.rpartition(".")

    def make(parent: Any) -> None:
        with asking(name):
            is_there = importlib.util.find_spec(name) is not None
        # A parent without a file is a stand-in made by hand, or a bare folder: no product.
        if is_there or not getattr(parent, "__file__", None):
            return
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None, origin=__name__)
        fill(module)
        places: tuple[tuple[dict[str, Any], str], ...] = (sys.modules, name), (vars(parent), child)
        for names, key in places:
            names[key] = module

        def take_away() -> None:
            for names, key in places:
                if names.get(key) is module:  # else somebody has replaced it since
                    del names[key]

        Patches(reason).add(Change(name, why, take_away))

    when_imported(package, name, make)


@contextmanager
def attempt(module: str, name: str) -> Iterator[None]:
    """Run a block that changes `module`; a failure is logged as an ERROR, and refuses the first block."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  a shim may raise anything, and the import goes on
        failure = f"{type(error).__name__}: {error}"
        if _failures.get(name) != failure:  # logged once for many routers
            _failures[name] = failure
            logger.error("[npu_replay] %s failed on %s: %s. %s", name, module, failure, MEANING)


def refuse_with(error: ReplayError) -> None:
    """Raise this error whenever a block is opened, until everything is forgotten."""
    _unusable.append(error)


def refuse_failures() -> None:
    """Run the shims of modules that are imported by now; raise if one failed, unless strict is off."""
    if _unusable:
        raise _unusable[0]
    for module in list(_waiting):  # a finder before ours in sys.meta_path may have found it
        _run_if_there(module)
    if _failures and environment.strict():
        _refuse()


def forget() -> None:
    """Stop waiting for imports, and forget failures."""
    for asked in (_waiting, _failures, _unusable):
        asked.clear()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


_thread = threading.local()


@contextmanager
def asking(name: str) -> Iterator[None]:
    """Mark a module as one that this thread asks other finders for, which may ask ours again.

    Inside the block a module can also be looked up without preparing anything.
    """
    before = _asked()
    _thread.names = before | {name}
    try:
        yield
    finally:
        _thread.names = before


# ---- the implementation


def _asked() -> frozenset[str]:
    return getattr(_thread, "names", frozenset())


def _refuse() -> None:
    raise ReplayError(
        "; ".join(f"{name} failed: {error}" for name, error in _failures.items()),
        where="at import",
        expected="a release that npu_replay knows how to change",
        got="another; it was left as it was",
        cause="a new release, or a patch of somebody else's in the same place. NPU_REPLAY_STRICT=off goes on "
        "without, NPU_REPLAY_DISABLE=on changes nothing at all",
    )


def _run_if_there(module: str) -> None:
    if (loaded := sys.modules.get(module)) is not None:
        _run(module, ran=not getattr(getattr(loaded, "__spec__", None), "_initializing", False))


def _run(module: str, *, ran: bool) -> None:
    """Run what waits for a module: what is early, and all of it if the module's code has `ran`."""
    waiting = _waiting.get(module, {})
    for name, (shim, early, ends) in list(waiting.items()):
        if (ran or early) and not environment.disabled():
            del waiting[name]
            with attempt(module, name):
                shim(sys.modules.get(module))
            if ends and name in _failures and environment.strict():
                waiting[name] = shim, early, ends  # so that a second import fails, too
                _refuse()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that somebody waits for by the other finders, and wraps their loaders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname in _asked() or not _waiting.get(fullname):
            return None
        others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
        with asking(fullname):
            specs = (finder.find_spec(fullname, path, target) for finder in others)
            spec = next((candidate for candidate in specs if candidate is not None), None)
            if spec is not None and hasattr(spec.loader, "exec_module"):
                spec.loader = _Loader(spec.loader, fullname)
            elif spec is not None:
                _run(fullname, ran=False)  # a namespace package, which has no code to run
        return spec


_finder = _Finder()


class _Loader(importlib.abc.Loader):
    """Wraps another loader for one import: it restores the module's spec, and runs the shims afterwards.

    A loader isn't copied or written to: it may be somebody's proxy, a class, or hooked on the instance.
    """

    def __init__(self, loader: Any, module: str) -> None:
        self._loader = loader
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        create: Any = getattr(self._loader, "create_module", lambda _: None)
        return create(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        _run(self._module, ran=False)
        self._loader.exec_module(module)
        if sys.modules.get(self._module) is module:
            _run(self._module, ran=True)
