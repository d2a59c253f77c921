"""The features that the stand-in has: arguments, a rule for every config, and patches.

The original has a package of this name, with a class for each.
"""

from __future__ import annotations

import inspect
from dataclasses import field
from typing import Any

from ascend_contract import wrappers
from ascend_contract.features import Feature, FeaturesManager

from mindspeed.branch import BRANCH
from mindspeed.patch_utils import MindSpeedPatchesManager

_CONFIG = "megatron.core.transformer.transformer_config.TransformerConfig"
_MOE = "megatron.core.transformer.moe"
_FLAG = {"action": "store_true"}

if BRANCH.over_megatron_adaptor:
    from megatron_adaptor.features_manager.features_manager import FeaturesManager  # type: ignore[assignment]


class MindSpeedFeaturesManager(FeaturesManager):
    """Takes MindSpeed's features to the others of the list, and its patches alone away."""

    manager = MindSpeedPatchesManager


def _of_config(_: Any) -> dict[str, Any]:
    from mindspeed.args_utils import get_full_args

    def init_subclass(cls: type, **kwargs: Any) -> None:
        """A subclass that is defined after this gets the arguments as fields with defaults."""
        parameters = inspect.signature(cls).parameters
        for name, value in vars(get_full_args()).items():
            if name not in parameters and not hasattr(cls, name):
                cls.__annotations__[name] = type(value)
                is_list = isinstance(value, (list, dict, set))
                setattr(cls, name, field(default_factory=lambda value=value: value) if is_list else value)

    patches = wrappers.of_config(get_full_args, MindSpeedFeaturesManager)
    return patches | (
        {f"{_CONFIG}.__init_subclass__": classmethod(init_subclass)} if BRANCH.init_subclass else {}
    )


def _check_zero_memory(config: Any) -> None:
    """It reads the config bare and so breaks replace()."""
    if config.moe_zero_memory_num_layers is not None:
        raise AssertionError("`--moe-zero-memory` must be enabled when using its number of layers")


def _feature(name: str, *arguments: str, **patches: str) -> Feature:
    flags = dict.fromkeys((name, *arguments), _FLAG)
    return Feature(MindSpeedPatchesManager, name, flags, patches=lambda args: patches)


_EXPERTS = {f"{_MOE}.experts.GroupedMLP": "mindspeed.layers:MindSpeedGmmExperts"}
_OVERLAP = {
    "megatron.core.models.gpt.moe_module_specs.get_moe_module_spec": "mindspeed.fb_overlap:moe_spec_wrapper",
    "megatron.core.transformer.transformer_block.TransformerBlock.__init__": (
        "mindspeed.fb_overlap:block_init_wrapper"
    ),
    "megatron.core.pipeline_parallel.schedules.get_forward_backward_func": (
        "mindspeed.fb_overlap:schedule_wrapper"
    ),
}
_ALLTOALL = {f"{_MOE}.moe_layer.MoELayer": "mindspeed.layers:MindSpeedAlltoAllOverlapMoeLayerAdaptor"}

FEATURES = [
    Feature(
        MindSpeedPatchesManager,
        arguments={"moe_zero_memory": {"default": "disable"}, "moe_zero_memory_num_layers": {"type": int}},
        check=_check_zero_memory,
        # MegatronAdaptor has patched torch where it is there.
        before=lambda args: {} if BRANCH.over_megatron_adaptor else wrappers.OF_TORCH,
        patches=_of_config,
    ),
    Feature(MindSpeedPatchesManager, "moe_grouped_gemm", patches=lambda args: _EXPERTS),
    _feature("moe_alltoall_overlap_comm", **_ALLTOALL),
    _feature("moe_fb_overlap", **_OVERLAP),
]
if BRANCH.over_megatron_adaptor:
    routing = {f"{_MOE}.router.TopKRouter.routing": "mindspeed.layers:router_score_reuse_wrapper"}
    FEATURES.append(_feature("moe_router_score_reuse", **routing))
MindSpeedFeaturesManager.FEATURES_LIST += FEATURES
if BRANCH.over_megatron_adaptor:
    # The arguments that MegatronAdaptor has read by now get those of MindSpeed. That is known; how isn't.
    from megatron_adaptor.utils.args_utils import get_mindspeed_args

    read = vars(get_mindspeed_args())
    read.update(vars(get_mindspeed_args(get_defaults=True)) | read)
