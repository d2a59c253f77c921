"""Applies the features: of these, the ones that a router or its config may notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_adaptor.patches.patch_manager import PatchesManager


def dummy_compile(*args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Return the function uncompiled, in the place of torch.compile."""
    if args and callable(args[0]):
        return args[0]
    return lambda function: function


class FeaturesManager:
    """Registers the patches of all features, and applies them."""

    @classmethod
    def apply_features_pre_patches(cls, args: Any) -> None:
        """Patch what has to be patched before Megatron is imported."""
        PatchesManager.register_patch("torch.compile", dummy_compile, force_patch=True)
        PatchesManager.apply_patches()

    @classmethod
    def apply_features_patches(cls, args: Any) -> None:
        """Patch Megatron's configs; this imports them."""
        from megatron_adaptor.patches.megatron.transformer_config import transformer_config_init_wrapper

        module = "megatron.core.transformer.transformer_config"
        for name in ("TransformerConfig", "MLATransformerConfig"):
            PatchesManager.register_patch(f"{module}.{name}.__init__", transformer_config_init_wrapper)
        PatchesManager.apply_patches()

    @classmethod
    def remove_patches(cls) -> None:
        PatchesManager.remove_patches()
