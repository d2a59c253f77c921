"""Serve SGLang's capturer module under its old name, from which verl 0.7 to 0.9.1 imports a function.

Asks:     whether SGLang has the module under its new name (from 0.5.12 on) only.
Changes:  nothing of SGLang's; the old name can be imported.
Undone:   the module that was made for it is removed.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from npu_replay.compat.patching import import_hook

OLD = "sglang.srt.layers.moe.routed_experts_capturer"
NEW = "sglang.srt.state_capturer.routed_experts"


def install() -> None:
    """Let the old name be imported if SGLang has only the new one."""

    def fill(module: ModuleType) -> None:
        names = vars(importlib.import_module(NEW))
        vars(module).update({name: value for name, value in names.items() if not name.startswith("__")})

    def new_is_there() -> bool:
        try:
            return importlib.util.find_spec(NEW) is not None
        except ModuleNotFoundError:  # its package is missing, too
            return False

    what = f"the old name of {NEW}, which verl imports"
    import_hook.serve(OLD, fill, what, reason="SGLang's routes in verl", where=new_is_there)
