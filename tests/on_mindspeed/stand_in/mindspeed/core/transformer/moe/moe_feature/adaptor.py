"""The layers under the names by which features put them in Megatron's place."""

from __future__ import annotations

from typing import Any

from mindspeed.core.transformer.moe.moe_feature import MoELayer as MegatronMoELayer
from mindspeed.core.transformer.moe.moe_feature.mc2moe.moe_layer import AlltoAllMC2MoeLayer
from mindspeed.core.transformer.moe.moe_feature.overlap.moe_layer import (
    AllGatherOverlapMoeLayer,
    AlltoAllOverlapMoeLayer,
    AlltoAllSeqOverlapMoeLayer,
)
from mindspeed.core.transformer.moe.moe_feature.parts import LocalExperts
from mindspeed.core.transformer.moe.moe_feature.tp_extend_ep import All2AllSeqTpExtendEpMoELayerImpl


class MindSpeedGmmExperts(LocalExperts):
    """moe_grouped_gemm's experts."""


class MindSpeedAlltoAllSEQTptoEpMoELayer(All2AllSeqTpExtendEpMoELayerImpl, MegatronMoELayer):
    """A Megatron MoELayer to isinstance."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        All2AllSeqTpExtendEpMoELayerImpl.__init__(self, *args, **kwargs)


class MindSpeedAlltoAllSeqOverlapMoeLayerAdaptor(AlltoAllSeqOverlapMoeLayer, MegatronMoELayer):
    """A Megatron MoELayer to isinstance."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        AlltoAllSeqOverlapMoeLayer.__init__(self, *args, **kwargs)


class MindSpeedAllGatherOverlapMoeLayerAdaptor(AllGatherOverlapMoeLayer, MegatronMoELayer):
    """A Megatron MoELayer to isinstance."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        AllGatherOverlapMoeLayer.__init__(self, *args, **kwargs)


class MindSpeedAlltoAllOverlapMoeLayerAdaptor(AlltoAllOverlapMoeLayer):
    """No Megatron MoELayer, only a BaseMoELayer."""


class MindSpeedAlltoAllMC2MoeLayerAdaptor(AlltoAllMC2MoeLayer, MegatronMoELayer):
    """A Megatron MoELayer to isinstance."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        AlltoAllMC2MoeLayer.__init__(self, *args, **kwargs)
