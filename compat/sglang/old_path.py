"""The old name of SGLang's capturer module, for callers that import it there.

`sglang.srt.layers.moe.routed_experts_capturer` became `sglang.srt.state_capturer.routed_experts` in 0.5.12;
verl 0.7 to 0.9.1 imports `extract_routed_experts_from_meta_info` from the old name when the first routes
come.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from npu_replay.compat.patching import import_hook

OLD = "sglang.srt.layers.moe.routed_experts_capturer"
NEW = "sglang.srt.state_capturer.routed_experts"


def install() -> None:
    """Let the old name be imported where SGLang has the new one alone."""
    import_hook.serve(
        OLD,
        _fill,
        f"the old name of {NEW}, which verl imports",
        reason="SGLang's routes in verl",
        where=_new_is_there,
    )


def _fill(module: ModuleType) -> None:
    """Give it all that the module has under its new name."""
    names = vars(importlib.import_module(NEW))
    vars(module).update({name: value for name, value in names.items() if not name.startswith("__")})


def _new_is_there() -> bool:
    try:
        return importlib.util.find_spec(NEW) is not None
    except ModuleNotFoundError:  # not even its package
        return False
