"""The old name of SGLang's capturer module, for callers that import it there.

`sglang.srt.layers.moe.routed_experts_capturer` became `sglang.srt.state_capturer.routed_experts` in 0.5.12;
verl 0.7 to 0.9.1 imports `extract_routed_experts_from_meta_info` from the old name when the first routes
come. The finder is asked last, so a module that is there is found as ever.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

from npu_replay.compat import import_hook

OLD = "sglang.srt.layers.moe.routed_experts_capturer"
NEW = "sglang.srt.state_capturer.routed_experts"


def install() -> None:
    """Let the old name be imported where SGLang has the new one alone."""
    if not import_hook.disabled() and _finder not in sys.meta_path:
        sys.meta_path.append(_finder)


def uninstall() -> None:
    """Take the old name away again, and the module that was made for it."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    module = sys.modules.get(OLD)
    if module is not None and getattr(module.__spec__, "loader", None) is _finder:
        del sys.modules[OLD]
        parent = sys.modules.get(OLD.rpartition(".")[0])
        if getattr(parent, "routed_experts_capturer", None) is module:
            delattr(parent, "routed_experts_capturer")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the old name alone, and loads it as a module with all that the new one has."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(OLD, self, origin=NEW) if fullname == OLD and _is_there(NEW) else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        names = vars(importlib.import_module(NEW))
        vars(module).update({name: value for name, value in names.items() if not name.startswith("__")})


_finder = _Finder()


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package
        return False
