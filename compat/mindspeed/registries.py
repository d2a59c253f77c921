"""Lists the patches that MindSpeed and MegatronAdaptor have made, each product in a registry of its own.

Both keep what a name had before they patched it, and set their patch again with each repatch. From
core_r0.17.0 on MindSpeed imports MegatronAdaptor, so both may have a patch of one constructor.

Asks:     the registries of the products that are imported.
Changes:  nothing.
Undone:   there is nothing to undo.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

MIND_SPEED = "mindspeed.megatron_adaptor"
MEGATRON_ADAPTOR = "megatron_adaptor"
"""The modules whose import puts a product's patches in place."""


@dataclass(frozen=True)
class Registry:
    """Names a product's registry, and the module whose import puts its patches in place."""

    product: str
    entry: str
    module: str
    manager: str

    def patches(self) -> dict[str, Any]:
        """Return its patches by the full name of what they change; none where it isn't imported."""
        manager = getattr(sys.modules.get(self.module), self.manager, None)  # None while it is being imported
        return {} if manager is None else manager.patches_info


ALL = (
    Registry("MegatronAdaptor", MEGATRON_ADAPTOR, "megatron_adaptor.patches.patch_manager", "PatchesManager"),
    Registry("MindSpeed", MIND_SPEED, "mindspeed.patch_utils", "MindSpeedPatchesManager"),
)


def patches_of(name: str) -> list[Any]:
    """Return every registry's patch of this name that has been in place, the lowest first.

    Each has `orig_func`, what lies beneath it, and `final_patch_func`, which it has put there.
    """
    known = [registry.patches().get(name) for registry in ALL]
    patches = [patch for patch in known if patch is not None and patch.orig_func is not None]
    finals = [patch.final_patch_func for patch in patches]
    # One that has taken another's for the original lies over it; where that can't be told, MindSpeed does.
    return sorted(patches, key=lambda patch: patch.orig_func in finals)
