"""A stand-in for MegatronAdaptor: the few of its manners that routing replay can notice, in our own words.

Importing it, after torch and before Megatron, patches both. `repatch` does so again with other arguments. The
facts are of branch core_r0.18.0; nothing here needs an NPU.
"""

from __future__ import annotations

from typing import Any

from megatron_adaptor.features_manager.features_manager import FeaturesManager
from megatron_adaptor.utils.args_utils import get_full_args, get_mindspeed_args


def repatch(args: dict[str, Any]) -> None:
    """Undo every patch of this product, take over `args` for good, and patch anew."""
    FeaturesManager.remove_patches()
    full_args = get_full_args()
    for name, value in args.items():
        setattr(full_args, name, value)
    FeaturesManager.apply_features_pre_patches(full_args)
    FeaturesManager.apply_features_patches(full_args)


FeaturesManager.apply_features_pre_patches(get_mindspeed_args())
FeaturesManager.apply_features_patches(get_mindspeed_args())
