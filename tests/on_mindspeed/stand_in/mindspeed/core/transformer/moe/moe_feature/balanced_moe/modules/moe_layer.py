"""The layer of balanced_moe_experts: moe_fb_overlap's with copies of the experts that are asked most."""

from __future__ import annotations

from typing import Any

from mindspeed.core.transformer.moe.moe_feature import BaseMoELayer
from mindspeed.core.transformer.moe.moe_feature.fb_overlap.modules.moe_layer import (
    MindSpeedFbOverlapGmmExperts,
)
from mindspeed.core.transformer.moe.moe_feature.parts import equip, groups_of


class BalancedMoELayer(BaseMoELayer):
    """Recognised by its `hot_experts`; the stand-in has them but sends nothing to them."""

    def __init__(
        self, config: Any, submodules: Any = None, layer_number: int | None = None, **given: Any
    ) -> None:
        self.submodules = submodules
        groups = groups_of(given)
        super().__init__(config, layer_number, **groups)
        equip(self, groups, MindSpeedFbOverlapGmmExperts)
        self.hot_experts = MindSpeedFbOverlapGmmExperts(config.balanced_moe_hot_expert_num, config, **groups)

    def forward(self, hidden_states: Any) -> None:
        """Nothing: the layers call the router themselves."""
