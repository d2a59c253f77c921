"""moe_tp_extend_ep's layer: it calls the router as a module."""

from __future__ import annotations

from typing import Any

from mindspeed.core.transformer.moe.moe_feature import BaseMoELayer
from mindspeed.core.transformer.moe.moe_feature.parts import compute, equip, groups_of


class All2AllSeqTpExtendEpMoELayerImpl(BaseMoELayer):
    """A plain layer; what is special is the router's routing."""

    def __init__(
        self, config: Any, submodules: Any = None, layer_number: int | None = None, **given: Any
    ) -> None:
        self.submodules = submodules
        groups = groups_of(given)
        BaseMoELayer.__init__(self, config, layer_number, **groups)
        equip(self, groups)

    def forward(self, hidden_states: Any) -> Any:
        probs, routing_map = self.router(hidden_states)
        return compute(self, hidden_states, probs, routing_map), None
