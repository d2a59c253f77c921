"""The layer of moe_fb_overlap: nobody calls its forward."""

from __future__ import annotations

from typing import Any

from mindspeed.core.transformer.moe.moe_feature import BaseMoELayer
from mindspeed.core.transformer.moe.moe_feature.parts import LocalExperts, equip, groups_of


class MindSpeedFbOverlapGmmExperts(LocalExperts):
    """Its experts."""


class MindSpeedFbOverlapMoELayer(BaseMoELayer):
    """Router, dispatcher and experts, for the functions of overlap_funcs."""

    def __init__(
        self, config: Any, submodules: Any = None, layer_number: int | None = None, **given: Any
    ) -> None:
        self.submodules = submodules
        groups = groups_of(given)
        super().__init__(config, layer_number, **groups)
        if not config.moe_grouped_gemm:
            raise ValueError("use fb overlap should open moe_grouped_gemm")
        if config.moe_token_dispatcher_type != "alltoall":
            raise AssertionError("currently fb overlap only support alltoall token dispatcher")
        equip(self, groups, MindSpeedFbOverlapGmmExperts)

    def forward(self, hidden_states: Any) -> None:
        """Nothing: the layers call the router themselves."""
