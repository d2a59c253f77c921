"""A stand-in for MegatronAdaptor: the few of its manners that routing replay can notice, in our own words.

It lies in a folder of its own, which a test puts on the path of the process that asks for it. The source of
MegatronAdaptor can't be fetched: what is here follows the code of the projects that build on it (MindSpeed,
ROLL, vime, AReaL) and a copy of its patch manager in Megatron-LM-FL. Nothing of it routes.

Importing it patches torch, imports Megatron and patches that, once. `repatch` does it again.
"""

from __future__ import annotations

from typing import Any

from megatron_adaptor.features_manager import create_features_list
from megatron_adaptor.features_manager.features_manager import FeaturesManager
from megatron_adaptor.utils.args_utils import get_full_args, get_mindspeed_args

__all__ = ["repatch"]


def repatch(args: dict[str, Any]) -> None:
    """Undo MegatronAdaptor's patches, take over `args` for good, and patch anew."""
    FeaturesManager.remove_patches()
    full_args = get_full_args()
    for name, value in args.items():
        setattr(full_args, name, value)
    FeaturesManager.apply_features_pre_patches(full_args)
    FeaturesManager.apply_features_patches(full_args)


FeaturesManager.set_features_list(create_features_list())
FeaturesManager.apply_features_pre_patches(get_mindspeed_args())
FeaturesManager.apply_features_patches(get_mindspeed_args())
