"""Run something as soon as a module is imported, whichever of the two comes first.

npu_replay imports no framework: the order of imports changes what MindSpeed patches. So what has to be done
to a framework waits for its import, in a finder that answers for the modules that somebody waits for and for
no other.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from npu_replay.errors import ReplayError

logger = logging.getLogger(__name__)

Shim = Callable[[Any], None]
"""Changes a module that was just imported; leaves it as it was if it raises."""

_waiting: dict[str, dict[str, Shim]] = {}
_failures: dict[str, str] = {}


def when_imported(module: str, name: str, shim: Shim) -> None:
    """Call `shim(module)` when `module` is imported, or now if it is. `name` says in messages what it does.

    With NPU_REPLAY_DISABLE=1 nothing is done. A shim that raises is logged as an ERROR; the import goes on,
    and the first block that the shim was meant for is refused (`refuse_failures`).
    """
    if disabled():
        return
    imported = sys.modules.get(module)
    if imported is not None and not _is_loading(imported):
        _run(imported, name, shim)
        return
    _waiting.setdefault(module, {})[name] = shim
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def forget() -> None:
    """Wait for no import any more, and forget what failed."""
    _waiting.clear()
    _failures.clear()
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def disabled() -> bool:
    """Has the user turned all changes to other modules off?"""
    return os.environ.get("NPU_REPLAY_DISABLE", "") not in ("", "0")


def refuse_failures() -> None:
    """Refuse to go on without a shim that failed, unless NPU_REPLAY_STRICT=0.

    Raises:
        ReplayError: says what failed, and how.
    """
    if not _failures or os.environ.get("NPU_REPLAY_STRICT") == "0":
        return
    raise ReplayError(
        f"{'; '.join(f'{name} failed: {error}' for name, error in _failures.items())}",
        where="at import",
        expected="a release that npu_replay knows how to change",
        got="another; it was left as it was",
        cause="a new release, or a patch of somebody else's in the same place. NPU_REPLAY_STRICT=0 goes on "
        "without, NPU_REPLAY_DISABLE=1 changes nothing at all",
    )


class _Finder(importlib.abc.MetaPathFinder):
    """Finds what others find, and has their loader tell when it is done."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    _tell_when_executed(spec.loader, fullname)
                return spec
        return None


_finder = _Finder()


def _tell_when_executed(loader: Any, module: str) -> None:
    execute = loader.exec_module

    def exec_module(imported: ModuleType) -> None:
        del loader.exec_module  # the loader may be asked for other modules
        execute(imported)
        for name, shim in _waiting.pop(module, {}).items():
            _run(imported, name, shim)

    loader.exec_module = exec_module


def _run(imported: ModuleType, name: str, shim: Shim) -> None:
    try:
        shim(imported)
    except Exception as error:  # noqa: BLE001  somebody else's module may be anything, and its import goes on
        _failures[name] = f"{type(error).__name__}: {error}"
        logger.error("[npu_replay] %s failed on %s: %s", name, imported.__name__, _failures[name])


def _is_loading(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))
