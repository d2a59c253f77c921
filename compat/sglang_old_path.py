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
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType

from npu_replay.compat import import_hook
from npu_replay.compat.patching import Patch, Patches

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
    _patches.undo()


@dataclass(frozen=True, eq=False)
class _Alias(Patch):
    """The module under its old name, of which `replacement` is what was made."""

    @property
    def where(self) -> str:
        return OLD

    def undo(self) -> bool:
        if sys.modules.get(OLD) is self.replacement:
            del sys.modules[OLD]
        package, _, name = OLD.rpartition(".")
        parent = sys.modules.get(package)
        if getattr(parent, name, None) is self.replacement:
            delattr(parent, name)
        return True


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
        _patches.add(_Alias(sys, "modules", f"the old name of {NEW}, which verl imports", None, module))


_finder = _Finder()
_patches = Patches("SGLang's routes in verl")


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even its package
        return False
