"""A feature: a name, a level, arguments, checks, patches."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any


class MindSpeedFeature:
    """Base class. Level 0 is always on; others are on where an argument of the feature's name is true."""

    def __init__(self, feature_name: str, optimization_level: int = 2) -> None:
        self.feature_name = feature_name.lower().strip().replace("-", "_")
        self.optimization_level = optimization_level
        self.default_patches = optimization_level == 0

    def is_need_apply(self, args: Any) -> Any:
        """Is it on under these arguments?"""
        asked = self.optimization_level <= args.optimization_level and getattr(args, self.feature_name, None)
        return asked or self.default_patches

    def register_args(self, parser: ArgumentParser) -> None:
        """Arguments that turn it on."""

    def pre_validate_args(self, args: Any) -> None:
        """Before Megatron's own checks; of every config too, whether the feature is on or not."""

    def validate_args(self, args: Any) -> None:
        """After them."""

    def post_validate_args(self, args: Any) -> None:
        """Between the two."""

    def pre_register_patches(self, patch_manager: Any, args: Any) -> None:
        """Patches that come before megatron is imported."""

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        """All other patches."""

    def incompatible_check(self, global_args: Any, check_args: str) -> None:
        """Raise if this feature and another argument are both on."""
        if getattr(global_args, self.feature_name, None) and getattr(global_args, check_args, None):
            raise AssertionError(f"{self.feature_name} and {check_args} are incompatible.")

    def dependency_check(self, global_args: Any, check_args: str) -> None:
        """Raise if this feature is on without an argument that it needs."""
        if getattr(global_args, self.feature_name, None) and not getattr(global_args, check_args, None):
            raise AssertionError(f"{self.feature_name} requires {check_args}.")
