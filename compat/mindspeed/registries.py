"""Lists the patches that MindSpeed and MegatronAdaptor have made, each product in a registry of its own.

Both keep what a name had before they patched it, and set their patch again with each repatch. From
core_r0.17.0 on MindSpeed imports MegatronAdaptor, so both may have a patch of one constructor.

Asks:     the registries of the products that are imported.
Changes:  nothing.
Undone:   there is nothing to undo.
"""

from __future__ import annotations

import sys
from typing import Any

_REGISTRIES = (
    ("megatron_adaptor.patches.patch_manager", "PatchesManager"),
    ("mindspeed.patch_utils", "MindSpeedPatchesManager"),
)
"""The module and the class of each product's registry."""


def patches_of(name: str) -> list[Any]:
    """Return every registry's patch of this name that has been in place, the lowest first.

    Each has `orig_func`, what lies beneath it, and `final_patch_func`, which it has put there.
    """
    # None while a product is being imported, or where it isn't.
    managers = [getattr(sys.modules.get(module), manager, None) for module, manager in _REGISTRIES]
    known = [manager.patches_info.get(name) for manager in managers if manager is not None]
    patches = [patch for patch in known if patch is not None and patch.orig_func is not None]
    finals = [patch.final_patch_func for patch in patches]
    # One that has taken another's for the original lies over it; where that can't be told, MindSpeed does.
    return sorted(patches, key=lambda patch: patch.orig_func in finals)
