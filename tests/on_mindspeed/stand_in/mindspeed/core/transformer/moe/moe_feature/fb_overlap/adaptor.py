"""Where moe_fb_overlap is put in: the layer's spec, and the schedule, taken only with grad enabled."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import ModuleSpec

from mindspeed.args_utils import get_full_args as get_args
from mindspeed.core.transformer.moe.moe_feature.fb_overlap.modules.moe_layer import (
    MindSpeedFbOverlapGmmExperts,
    MindSpeedFbOverlapMoELayer,
)
from mindspeed.core.transformer.moe.moe_feature.fb_overlap.no_pipelining_schedules import (
    forward_backward_no_pipelining,
)


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


def get_moe_module_spec_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The spec with MindSpeed's layer in it."""

    @wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        spec = fn(*args, **kwargs)
        if get_args().moe_fb_overlap:
            spec.module = MindSpeedFbOverlapMoELayer
            spec.submodules.experts = ModuleSpec(module=MindSpeedFbOverlapGmmExperts)
        return spec

    return wrapper
