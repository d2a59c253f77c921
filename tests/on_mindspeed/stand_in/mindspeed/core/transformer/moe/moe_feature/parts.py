"""The parts of a layer: Megatron's own router, dispatchers and experts, so that a layer really computes.

No fact of MindSpeed's is played here; its kernels need an NPU.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.spec_utils import build_module

from mindspeed.core.transformer.moe.moe_feature import BaseMoELayer, SequentialMLP, TopKRouter


def groups_of(given: dict[str, Any]) -> dict[str, Any]:
    """The process groups that this Megatron's layers want by name; none before 0.13."""
    for name in ("pg_collection", "model_comm_pgs"):
        if name in inspect.signature(BaseMoELayer.__init__).parameters:
            return {name: given.get(name) or getattr(moe_utils, f"get_default_{name}")()}
    return {}


class LocalExperts(SequentialMLP):
    """Experts on the CPU, one after the other."""

    def __init__(self, num_local_experts: int, config: Any, *_: Any, **given: Any) -> None:
        linears = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(num_local_experts, config, linears, **groups_of(given))


class Layer(BaseMoELayer):
    """A layer of MindSpeed's: it calls the router as a module."""

    experts_class: ClassVar[type] = LocalExperts

    def __init__(
        self, config: Any, submodules: Any = None, layer_number: int | None = None, **given: Any
    ) -> None:
        self.submodules = submodules
        groups = groups_of(given)
        BaseMoELayer.__init__(self, config, layer_number, **groups)
        self.router = TopKRouter(config=config, **groups)
        self.experts = build_module(self.experts_class, self.num_local_experts, config, **groups)
        self.token_dispatcher = _dispatcher(config.moe_token_dispatcher_type)(
            self.num_local_experts, self.local_expert_indices, config=config, **groups
        )
        if self.use_shared_expert:
            self.shared_experts = build_module(submodules.shared_experts, config=config, **groups)

    def forward(self, hidden_states: Any, **_: Any) -> Any:
        probs, routing_map = self.router(hidden_states)
        return compute(self, hidden_states, probs, routing_map), None


def _dispatcher(kind: str) -> Any:
    if kind == "alltoall_seq":
        from megatron.core.transformer.moe.legacy_a2a_token_dispatcher import MoEAlltoAllSEQTokenDispatcher

        return MoEAlltoAllSEQTokenDispatcher
    classes = {"allgather": "MoEAllGatherTokenDispatcher", "alltoall": "MoEAlltoAllTokenDispatcher"}
    return getattr(token_dispatcher, classes[kind])


def compute(layer: Any, hidden: Any, probs: Any, routing_map: Any) -> Any:
    """The experts' output for a routing, and the shared experts'."""
    dispatcher = layer.token_dispatcher
    experts = layer.experts
    if hasattr(dispatcher, "token_permutation"):
        rows, counts, weights = dispatcher.token_permutation(hidden, probs, routing_map)
        output, _ = dispatcher.token_unpermutation(*experts(rows, counts, weights))
    else:
        rows, weights = dispatcher.dispatch_preprocess(hidden, routing_map, probs)
        sent = dispatcher.token_dispatch(rows, weights)
        computed, _ = experts(*dispatcher.dispatch_postprocess(*sent))
        output = dispatcher.token_combine(dispatcher.combine_preprocess(computed))
        output = dispatcher.combine_postprocess(output)
    if getattr(layer, "shared_experts", None) is not None:
        output = output + layer.shared_experts(hidden)
    return output
