"""The layers under the names by which features put them in Megatron's place."""

from __future__ import annotations

from typing import Any

import torch

from mindspeed.core.transformer.moe.moe_feature import MoELayer as MegatronMoELayer
from mindspeed.core.transformer.moe.moe_feature.parts import Layer, LocalExperts, compute


class MindSpeedGmmExperts(LocalExperts):
    """moe_grouped_gemm's experts."""


class MindSpeedAlltoAllSEQTptoEpMoELayer(Layer, MegatronMoELayer):
    """moe_tp_extend_ep; what is special is the router's routing."""


class MindSpeedAlltoAllMC2MoeLayerAdaptor(Layer, MegatronMoELayer):
    """moe_alltoall_mc2; the original fuses communication and computing."""


class _Overlapped(torch.autograd.Function):
    """A layer's forward keeps its own pieces of graph; backward runs them one after the other."""

    @staticmethod
    def forward(ctx: Any, hidden_states: torch.Tensor, moe_layer: Any) -> Any:
        with torch.enable_grad():  # whatever the mode around it
            hidden_states = hidden_states.detach().requires_grad_()
            scores, routing_map = moe_layer.router(hidden_states)
            detached_scores = scores.detach().requires_grad_()
            output = compute(moe_layer, hidden_states, detached_scores, routing_map)
        ctx.save_for_backward(hidden_states, scores, detached_scores, output)
        return output.detach(), None

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        hidden_states, scores, detached_scores, output = ctx.saved_tensors
        output.backward(grad)
        scores.backward(detached_scores.grad)
        return hidden_states.grad, None


class MindSpeedAlltoAllOverlapMoeLayerAdaptor(Layer):
    """moe_alltoall_overlap_comm: no Megatron MoELayer, only a BaseMoELayer."""

    def __init__(self, config: Any, *args: Any, **given: Any) -> None:
        if not config.moe_grouped_gemm:
            raise ValueError("use '--moe-alltoall-overlap-comm' should open '--moe-grouped-gemm'.")
        super().__init__(config, *args, **given)

    def forward(self, hidden_states: Any, **_: Any) -> Any:
        return _Overlapped.apply(hidden_states, self)


class MindSpeedAlltoAllSeqOverlapMoeLayerAdaptor(MindSpeedAlltoAllOverlapMoeLayerAdaptor, MegatronMoELayer):
    """The same with alltoall_seq."""


class MindSpeedAllGatherOverlapMoeLayerAdaptor(MindSpeedAlltoAllOverlapMoeLayerAdaptor, MegatronMoELayer):
    """moe_allgather_overlap_comm."""
