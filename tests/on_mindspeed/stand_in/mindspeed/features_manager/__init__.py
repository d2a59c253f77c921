"""The features that the stand-in has, in MindSpeed's order."""

from __future__ import annotations

from mindspeed.branch import BRANCH
from mindspeed.deprecate import AutoExecuteFunction
from mindspeed.features_manager.feature import MindSpeedFeature
from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager
from mindspeed.features_manager.megatron_basic import MegatronBasicFeature, RequirementsBasicFeature
from mindspeed.features_manager.moe import (
    BalancedMoEFeature,
    MoEAllGatherOverLapFeature,
    MoEAlltoAllMC2Feature,
    MoEAlltoAllOverLapFeature,
    MoEFixRouterFeature,
    MoEFwdBwdOverlapFeature,
    MoEGmmFeature,
    MoESharedExpertsFeature,
    MoETpExtendEpFeature,
    MoEZeroMemoryFeature,
)

__all__ = ["MindSpeedFeature", "MindSpeedFeaturesManager", "create_features_list"]


def create_features_list() -> list[MindSpeedFeature]:
    """One of each."""
    features: list[MindSpeedFeature] = [
        RequirementsBasicFeature(),
        MegatronBasicFeature(),
        MoEGmmFeature(),
        MoETpExtendEpFeature(),
        MoESharedExpertsFeature(),
        MoEAllGatherOverLapFeature(),
        MoEAlltoAllOverLapFeature(),
        MoEZeroMemoryFeature(),
        MoEFwdBwdOverlapFeature(),
        BalancedMoEFeature(),
    ]
    if BRANCH.has_mc2:
        features.append(MoEAlltoAllMC2Feature())
    if BRANCH.has_fix_router:
        features.append(MoEFixRouterFeature())
    return features


@AutoExecuteFunction
def set_default_features_list() -> None:
    """Fill the list at import."""
    MindSpeedFeaturesManager.set_features_list(create_features_list())


set_default_features_list()
