"""Activation: importing this does everything, once; `repatch` does it again with other arguments."""

from __future__ import annotations

from typing import Any

from torch_npu.contrib import transfer_to_npu  # noqa: F401 - first of all, as in the original

from mindspeed.args_utils import get_full_args, get_mindspeed_args
from mindspeed.features_manager import MindSpeedFeaturesManager


def repatch(args: dict[str, Any]) -> None:
    """Undo every patch, take over `args` for good, and patch anew."""
    MindSpeedFeaturesManager.remove_patches()
    full_args = get_full_args()
    for name, value in args.items():
        setattr(full_args, name, value)
    _apply(full_args)


def _apply(args: Any) -> None:
    MindSpeedFeaturesManager.apply_features_pre_patches(args)
    MindSpeedFeaturesManager.apply_features_patches(args)


_apply(get_mindspeed_args())
