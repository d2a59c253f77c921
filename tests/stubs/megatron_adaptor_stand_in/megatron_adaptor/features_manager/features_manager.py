"""What is done to all features, in the order of their list: each feature's patches go to its own manager."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any, ClassVar

from megatron_adaptor.features_manager.mindspeed_feature import MindSpeedFeature
from megatron_adaptor.patches.patch_manager import PatchesManager


class FeaturesManager:
    """MindSpeed from 1881e01a on derives its manager from this one, and adds its features to this list."""

    FEATURES_LIST: ClassVar[list[MindSpeedFeature]] = []

    @classmethod
    def set_features_list(cls, features_list: list[MindSpeedFeature]) -> None:
        cls.FEATURES_LIST[:] = features_list

    @classmethod
    def apply_features_pre_patches(cls, args: Any) -> None:
        """Make the patches that come before Megatron is imported."""
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(args) and not feature.pre_patches_applied:
                feature.pre_register_patches(feature.patch_manager, args)
                feature.pre_patches_applied = True
        cls._apply()

    @classmethod
    def apply_features_patches(cls, args: Any) -> None:
        """Make all others."""
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(args) and not feature.patches_applied:
                feature.register_patches(feature.patch_manager, args)
                feature.patches_applied = True
        cls._apply()

    @classmethod
    def _apply(cls) -> None:
        managers = [feature.patch_manager for feature in cls.FEATURES_LIST]
        for manager in dict.fromkeys(managers):
            manager.apply_patches()

    @classmethod
    def remove_patches(cls) -> None:
        """Undo MegatronAdaptor's patches alone."""
        for feature in cls.FEATURES_LIST:
            if feature.patch_manager is PatchesManager:
                feature.pre_patches_applied = False
                feature.patches_applied = False
        PatchesManager.remove_patches()

    @classmethod
    def register_features_args(cls, parser: ArgumentParser) -> None:
        for feature in cls.FEATURES_LIST:
            feature.register_args(parser)

    @classmethod
    def pre_validate_features_args(cls, args: Any) -> None:
        for feature in cls.FEATURES_LIST:
            feature.pre_validate_args(args)

    @classmethod
    def validate_features_args(cls, args: Any) -> None:
        for feature in cls.FEATURES_LIST:
            feature.validate_args(args)

    @classmethod
    def post_validate_features_args(cls, args: Any) -> None:
        for feature in cls.FEATURES_LIST:
            feature.post_validate_args(args)
