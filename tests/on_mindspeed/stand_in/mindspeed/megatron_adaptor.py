"""Activation: importing this does everything, once; `repatch` does it again with other arguments."""

from __future__ import annotations

from typing import Any

from torch_npu.contrib import transfer_to_npu  # noqa: F401 - first of all, as in the original

from mindspeed.args_utils import get_full_args, get_mindspeed_args
from mindspeed.features_manager import MindSpeedFeaturesManager
from mindspeed.patch_utils import MindSpeedPatchesManager


def repatch(args: dict[str, Any]) -> None:
    """Undo every patch, take over `args` for good, and patch anew."""
    MindSpeedPatchesManager.remove_patches()
    full_args = get_full_args()
    for name, value in args.items():
        setattr(full_args, name, value)
    MindSpeedFeaturesManager.apply_patches(full_args)


MindSpeedFeaturesManager.apply_patches(get_mindspeed_args())
