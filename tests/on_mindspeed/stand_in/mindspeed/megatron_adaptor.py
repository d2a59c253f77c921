"""Activation: importing this does everything, once; `repatch` does it again with other arguments."""

from __future__ import annotations

from typing import Any

from torch_npu.contrib import transfer_to_npu  # noqa: F401 - first of all, as in the original

from mindspeed.args_utils import get_full_args, get_mindspeed_args
from mindspeed.deprecate import AutoExecuteFunction
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager

_IS_FEATURES_PATCHED = False


@AutoExecuteFunction
def patch_features() -> None:
    """Both rounds of patches: those that must come before megatron is imported, and the others."""
    global _IS_FEATURES_PATCHED
    if _IS_FEATURES_PATCHED:
        return
    _IS_FEATURES_PATCHED = True
    args = get_mindspeed_args()
    MindSpeedFeaturesManager.apply_features_pre_patches(args)
    MindSpeedFeaturesManager.apply_features_patches(args)


def repatch(args: dict[str, Any]) -> None:
    """Undo every patch, take over `args` for good, and patch anew."""
    MindSpeedFeaturesManager.remove_patches()
    full_args = get_full_args()
    for name, value in args.items():
        setattr(full_args, name, value)
    MindSpeedFeaturesManager.apply_features_pre_patches(full_args)
    MindSpeedFeaturesManager.apply_features_patches(full_args)


patch_features()
