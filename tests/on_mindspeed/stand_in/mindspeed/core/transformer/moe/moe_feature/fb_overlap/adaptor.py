"""Where moe_fb_overlap and balanced_moe_experts are put in: the layer's spec, and the schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import ModuleSpec
from mindspeed.args_utils import get_full_args as get_args
from mindspeed.core.transformer.moe.moe_feature.fb_overlap.schedules import forward_backward_no_pipelining
from mindspeed.core.transformer.moe.moe_feature.parts import Layer, LocalExperts, groups_of


class MindSpeedFbOverlapGmmExperts(LocalExperts):
    """Its experts."""


class MindSpeedFbOverlapMoELayer(Layer):
    """Router, dispatcher and experts, for the functions of overlap_funcs; nobody calls its forward."""

    experts_class = MindSpeedFbOverlapGmmExperts

    def __init__(self, config: Any, *args: Any, **given: Any) -> None:
        if not config.moe_grouped_gemm:
            raise ValueError("use fb overlap should open moe_grouped_gemm")
        if config.moe_token_dispatcher_type != "alltoall":
            raise AssertionError("currently fb overlap only support alltoall token dispatcher")
        super().__init__(config, *args, **given)

    def forward(self, hidden_states: Any) -> None:
        """Nothing: the layers call the router themselves."""


class BalancedMoELayer(MindSpeedFbOverlapMoELayer):
    """Recognised by its copies of busy experts; the stand-in has them but sends nothing to them."""

    def __init__(self, config: Any, *args: Any, **given: Any) -> None:
        super().__init__(config, *args, **given)
        copies = config.balanced_moe_hot_expert_num
        self.hot_experts = MindSpeedFbOverlapGmmExperts(copies, config, **groups_of(given))


def get_moe_module_spec_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The spec with MindSpeed's layer in it."""

    @wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        spec = fn(*args, **kwargs)
        if get_args().moe_fb_overlap:
            balanced = get_args().balanced_moe_experts
            spec.module = BalancedMoELayer if balanced else MindSpeedFbOverlapMoELayer
            spec.submodules.experts = ModuleSpec(module=MindSpeedFbOverlapGmmExperts)
        return spec

    return wrapper


def get_forward_backward_func_vpp_overlap_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's schedule for passes without grad."""

    @wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and get_args().moe_fb_overlap):
            return fn(*args, **kwargs)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            raise NotImplementedError("the stand-in plays no pipeline")
        return forward_backward_no_pipelining

    return wrapper
