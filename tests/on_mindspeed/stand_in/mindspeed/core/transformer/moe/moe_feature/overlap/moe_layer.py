"""The overlap features' layers: their forward is one custom autograd Function."""

from __future__ import annotations

from typing import Any, ClassVar

from mindspeed.core.transformer.moe.moe_feature import MegatronBaseMoeLayer
from mindspeed.core.transformer.moe.moe_feature.overlap.moe_layer_overlap_all2all import (
    MoELayerOverlapAllToAll,
)
from mindspeed.core.transformer.moe.moe_feature.overlap.moe_layer_overlap_all2allseq import (
    MoELayerOverlapAllToAllSeq,
)
from mindspeed.core.transformer.moe.moe_feature.overlap.moe_layer_overlap_allgather import (
    MoELayerOverlapAllGather,
)
from mindspeed.core.transformer.moe.moe_feature.parts import equip, groups_of


class _OverlapMoeLayer(MegatronBaseMoeLayer):
    function: ClassVar[Any]

    def __init__(
        self, config: Any, submodules: Any = None, layer_number: int | None = None, **given: Any
    ) -> None:
        self.submodules = submodules
        groups = groups_of(given)
        MegatronBaseMoeLayer.__init__(self, config, layer_number, **groups)
        if not config.moe_grouped_gemm:
            raise ValueError("use '--moe-alltoall-overlap-comm' should open '--moe-grouped-gemm'.")
        equip(self, groups)

    def forward(self, hidden_states: Any, **_: Any) -> Any:
        return self.function.apply(hidden_states, self.config, self)


class AlltoAllOverlapMoeLayer(_OverlapMoeLayer):
    """moe_alltoall_overlap_comm with the alltoall dispatcher."""

    function = MoELayerOverlapAllToAll


class AlltoAllSeqOverlapMoeLayer(_OverlapMoeLayer):
    """moe_alltoall_overlap_comm with the alltoall_seq dispatcher."""

    function = MoELayerOverlapAllToAllSeq


class AllGatherOverlapMoeLayer(_OverlapMoeLayer):
    """moe_allgather_overlap_comm."""

    function = MoELayerOverlapAllGather
