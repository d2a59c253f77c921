"""All features in one list, and what is done to all of them."""

from __future__ import annotations

from typing import Any

from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.patch_utils import MindSpeedPatchesManager


class MindSpeedFeaturesManager:
    """The list is one object for the process; its order is the order of patches."""

    FEATURES_LIST: list[MindSpeedFeature] = []  # noqa: RUF012 - one for the process, as in the original

    @classmethod
    def set_features_list(cls, features_list: list[MindSpeedFeature]) -> None:
        """Put these in the list."""
        cls.FEATURES_LIST[:] = features_list

    @classmethod
    def apply_features_pre_patches(cls, mindspeed_args: Any) -> None:
        """Patches that come before megatron is imported."""
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(mindspeed_args):
                feature.pre_register_patches(MindSpeedPatchesManager, mindspeed_args)
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def apply_features_patches(cls, mindspeed_args: Any) -> None:
        """All other patches."""
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(mindspeed_args):
                feature.register_patches(MindSpeedPatchesManager, mindspeed_args)
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def register_features_args(cls, parser: Any) -> None:
        """Every feature's arguments."""
        for feature in cls.FEATURES_LIST:
            feature.register_args(parser)

    @classmethod
    def pre_validate_features_args(cls, args: Any) -> None:
        """Every feature's checks before Megatron's own."""
        for feature in cls.FEATURES_LIST:
            feature.pre_validate_args(args)

    @classmethod
    def post_validate_features_args(cls, args: Any) -> None:
        """Every feature's repairs after Megatron's own checks."""
        for feature in cls.FEATURES_LIST:
            feature.post_validate_args(args)

    @classmethod
    def validate_features_args(cls, args: Any) -> None:
        """Every feature's checks after Megatron's own."""
        for feature in cls.FEATURES_LIST:
            feature.validate_args(args)

    @classmethod
    def remove_patches(cls) -> None:
        """Undo every patch."""
        MindSpeedPatchesManager.remove_patches()
