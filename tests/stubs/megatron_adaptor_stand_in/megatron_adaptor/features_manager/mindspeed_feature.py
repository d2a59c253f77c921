"""What a feature is, MegatronAdaptor's and, from 1881e01a on, MindSpeed's."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any


class MindSpeedFeature:
    """A feature is on where an argument of its name is true; at level 0 always."""

    def __init__(self, feature_name: str, optimization_level: int = 2) -> None:
        self.feature_name = feature_name.lower().strip().replace("-", "_")
        self.optimization_level = optimization_level
        self.default_patches = optimization_level == 0
        self.pre_patches_applied = False
        self.patches_applied = False

    @property
    def patch_manager(self) -> Any:
        """The table that its patches go into: MegatronAdaptor's; MindSpeed's features name theirs."""
        from megatron_adaptor.patches.patch_manager import PatchesManager

        return PatchesManager

    def is_need_apply(self, args: Any) -> bool:
        return self.default_patches or bool(
            self.optimization_level <= args.optimization_level and getattr(args, self.feature_name, None)
        )

    def register_args(self, parser: ArgumentParser) -> None:
        """Add its arguments."""

    def pre_validate_args(self, args: Any) -> None:
        """Check before Megatron's own checks."""

    def validate_args(self, args: Any) -> None:
        """Check after them."""

    def post_validate_args(self, args: Any) -> None:
        """Put back what was changed before them."""

    def pre_register_patches(self, patch_manager: Any, args: Any) -> None:
        """Register what has to be patched before Megatron is imported."""

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        """Register what else is patched."""
