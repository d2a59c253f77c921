"""Adds `is_vp_first_stage` and `is_vp_last_stage`, which verl imports, where Megatron-core lacks them.

They are new in 0.14, and their module in 0.13.

Asks:     each name by itself.
Changes:  the names in `pipeline_parallel.utils`; below 0.13 the module can be imported.
Undone:   the names and the module are taken away.
"""

from __future__ import annotations

from typing import Any

from npu_replay.compat.patching import import_hook
from npu_replay.compat.patching.patches import Patches

MODULE = "megatron.core.pipeline_parallel.utils"

_WHAT = "functions of later Megatron-core releases"


def install() -> None:
    import_hook.when_imported(MODULE, _WHAT, _add)
    import_hook.serve(MODULE, _fill, "is_vp_first_stage and is_vp_last_stage", reason=_WHAT)


def _add(module: Any) -> None:
    for function in (is_vp_first_stage, is_vp_last_stage):
        if not hasattr(module, function.__name__):
            _patches.set(module, function.__name__, function, "a later release's")


def _fill(module: Any) -> None:
    vars(module).update(is_vp_first_stage=is_vp_first_stage, is_vp_last_stage=is_vp_last_stage)


def is_vp_first_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Return whether this is the first of a rank's `vp_size` model chunks; a single chunk is.

    >>> from npu_replay.compat.megatron_backports.virtual_stages import is_vp_first_stage, is_vp_last_stage
    >>> is_vp_first_stage(1, 2), is_vp_last_stage(1, 2)
    (False, True)
    """
    return _place(vp_stage, vp_size) == 0


def is_vp_last_stage(vp_stage: int | None, vp_size: int | None) -> bool:
    """Return whether this is the last of a rank's `vp_size` model chunks; a single chunk is."""
    return _place(vp_stage, vp_size) == max(vp_size or 1, 1) - 1


def _place(vp_stage: int | None, vp_size: int | None) -> int | None:
    if vp_size is not None and vp_size > 1:
        return vp_stage
    if vp_stage not in (None, 0):
        raise AssertionError(f"Expected vp_stage to be 0 or None with {vp_size=}, but got {vp_stage=}")
    return 0


_patches = Patches(_WHAT)
