"""Serve SGLang's capturer module under its old name, from which verl 0.7 to 0.9.1 imports a function.

Asks:     whether SGLang has the module under its new name (from 0.5.12 on) only.
Changes:  nothing of SGLang's; the old name can be imported.
Undone:   the module that was made for it is removed.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from npu_replay.compat import probe
from npu_replay.compat.patching import import_hook

OLD = "sglang.srt.layers.moe.routed_experts_capturer"
NEW = "sglang.srt.state_capturer.routed_experts"


def install() -> None:
    """Let the old name be imported if SGLang has only the new one."""
    if probe.find(NEW) is None:
        return

    def named(name: str) -> Any:
        """Return a name of the new module, which is imported with the first."""
        if name.startswith("__"):  # asked of every module, by inspect and by import
            raise AttributeError(name)
        return getattr(importlib.import_module(NEW), name)

    def fill(module: ModuleType) -> None:
        module.__getattr__ = named  # type: ignore[method-assign]

    what = f"the old name of {NEW}, which verl imports"
    import_hook.serve(OLD, fill, what, "SGLang's routes in verl")
