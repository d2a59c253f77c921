"""The features that the stand-in has. MindSpeed from 1881e01a on adds its own to this list."""

from __future__ import annotations

from typing import Any

from ascend_contract import features, wrappers

from megatron_adaptor.patches.patch_manager import PatchesManager


class FeaturesManager(features.FeaturesManager):
    FEATURES_LIST = []  # noqa: RUF012 - its own, and not that of the class above
    manager = PatchesManager


def _of_config(_: Any) -> dict[str, Any]:
    from megatron_adaptor.utils.args_utils import get_full_args

    return wrappers.of_config(get_full_args, FeaturesManager)


FeaturesManager.FEATURES_LIST.append(
    features.Feature(PatchesManager, before=lambda args: wrappers.OF_TORCH, patches=_of_config)
)
