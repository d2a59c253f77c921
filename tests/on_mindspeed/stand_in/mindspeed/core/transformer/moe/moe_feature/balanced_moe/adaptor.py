"""Where balanced_moe_experts is put in: the layer's spec."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from mindspeed.args_utils import get_full_args as get_args
from mindspeed.core.transformer.moe.moe_feature.balanced_moe.modules.moe_layer import BalancedMoELayer


def get_moe_module_spec_wrapper(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The spec with the balanced layer in it."""

    @wraps(fn)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        spec = fn(*args, **kwargs)
        if get_args().balanced_moe_experts:
            spec.module = BalancedMoELayer
        return spec

    return wrapper
