"""The features that the stand-in has, in MindSpeed's order: arguments, rules for every config, and patches.

The original has a package of this name, with a class for each.
"""

from __future__ import annotations

import importlib
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from mindspeed.branch import BRANCH
from mindspeed.patch_utils import MindSpeedPatchesManager

_CONFIG = "megatron.core.transformer.transformer_config"
_MOE = "megatron.core.transformer.moe"
_OWN = "mindspeed.core.transformer.moe.moe_feature"
_DUMMIES = {  # what Megatron's Transformer Engine extension asks for, so that it can be imported
    "transformer_engine.pytorch": "LayerNorm LayerNormLinear DotProductAttention Linear GroupedLinear",
    "transformer_engine.pytorch.distributed": "CudaRNGStatesTracker activation_recompute_forward",
    "transformer_engine.pytorch.fp8": "FP8GlobalStateManager fp8_autocast",
    "transformer_engine.pytorch.ops": "Sequential FusibleOperation",
    "transformer_engine.pytorch.permutation": "moe_permute moe_permute_with_probs moe_sort_chunks_by_index"
    " moe_sort_chunks_by_index_with_probs moe_unpermute",
    "transformer_engine.pytorch.tensor": "QuantizedTensor",
    "transformer_engine.common.recipe": "DelayedScaling",
    "fused_weight_gradient_mlp_cuda": "wgrad_gemm_accum_fp32 wgrad_gemm_accum_fp16",
}
_FLAG = {"action": "store_true"}
_NUMBER = {"type": int, "default": None}
Patches = Callable[[Any], dict[str, Any]]
"""Of the arguments: what is put where, «module:name» for what is imported only then."""


@dataclass
class Feature:
    """A feature is on where an argument of its name is true; without a name always.

    Attributes:
        arguments: what the parser is given for each.
        needs, excludes: arguments that have to be on, or off, where the feature is on.
        pre_check: before Megatron's own checks; of every config, whether the feature is on or not.
        check: after them, of every config too.
        before: patches that come before megatron is imported.
    """

    name: str = ""
    arguments: dict[str, dict[str, Any]] | None = None
    needs: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    pre_check: Callable[[Any], None] = lambda args: None
    check: Callable[[Any], None] = lambda args: None
    before: Patches = lambda args: {}
    patches: Patches = lambda args: {}

    pre_patches_applied: bool = False
    patches_applied: bool = False

    @property
    def patch_manager(self) -> Any:
        return MindSpeedPatchesManager

    def is_need_apply(self, args: Any) -> bool:
        return not self.name or bool(args.optimization_level >= 2 and getattr(args, self.name, None))

    def register_args(self, parser: ArgumentParser) -> None:
        known = {option for action in parser._actions for option in action.option_strings}
        for name, how in (self.arguments or {}).items():
            option = f"--{name.replace('_', '-')}"
            if option not in known:  # MegatronAdaptor has some of them too
                parser.add_argument(option, **how)

    def pre_validate_args(self, args: Any) -> None:
        self.pre_check(args)

    def validate_args(self, args: Any) -> None:
        if self.name and getattr(args, self.name, None):
            for other in self.excludes:
                _require(not getattr(args, other, None), f"{self.name} and {other} are incompatible.")
            for other in self.needs:
                _require(getattr(args, other, None), f"{self.name} requires {other}.")
        self.check(args)

    def post_validate_args(self, args: Any) -> None:
        """Nothing here puts back what it changed."""

    def pre_register_patches(self, manager: Any, args: Any) -> None:
        self._register(self.before(args), manager)

    def register_patches(self, manager: Any, args: Any) -> None:
        self._register(self.patches(args), manager)

    def _register(self, patches: dict[str, Any], manager: Any) -> None:
        for name, new in patches.items():
            if isinstance(new, str):
                module, _, what = new.partition(":")
                new = getattr(importlib.import_module(module), what)
            manager.register_patch(name, new, create_dummy=new is torch.nn.Module)


def _require(holds: Any, rule: str) -> None:
    if not holds:
        raise AssertionError(rule)


def _before_megatron(args: Any) -> dict[str, Any]:
    if BRANCH.over_megatron_adaptor:
        return {}  # MegatronAdaptor did
    basic = "mindspeed.core.megatron_basic.requirements_basic"
    dummies = _DUMMIES if BRANCH.lends_transformer_engine else {}
    return {
        "torch.compile": f"{basic}:dummy_compile",
        "torch.jit.script": f"{basic}:dummy_compile",
        "importlib.metadata.version": f"{basic}:version_wrapper",
        **{f"{at}.{name}": torch.nn.Module for at, names in dummies.items() for name in names.split()},
        "torch.Tensor.view": f"{basic}:ensure_contiguous_wrapper",
        "torch.distributed.all_reduce": f"{basic}:torch_all_reduce_double_dtype_bypass_wrapper",
    }


class TELinear(torch.nn.Linear):
    """In the place of a class that only Transformer Engine has."""


def _of_the_config(args: Any) -> dict[str, Any]:
    """The wrappers of the config: the reason why an unknown argument is no error under MindSpeed."""
    basic = "mindspeed.core.megatron_basic.arguments_basic"
    found: dict[str, Any] = {
        f"{_CONFIG}.TransformerConfig.__init__": f"{basic}:transformer_config_init_wrapper",
        f"{_CONFIG}.MLATransformerConfig.__init__": f"{basic}:transformer_config_init_wrapper",
        f"{_CONFIG}.TransformerConfig.__post_init__": f"{basic}:transformer_config_post_init_wrapper",
    }
    if BRANCH.init_subclass:
        init_subclass = importlib.import_module(basic).transformer_config_init_subclass
        found[f"{_CONFIG}.TransformerConfig.__init_subclass__"] = classmethod(init_subclass)
    if BRANCH.replaces_te_linear:
        # Where Megatron came first, it is a mock that no isinstance() takes.
        found["megatron.core.extensions.transformer_engine.TELinear"] = TELinear
    if BRANCH.replaces_checkpointed_forward:
        found["megatron.core.transformer.transformer_block.TransformerBlock._checkpointed_forward"] = (
            "mindspeed.core.memory.common:transformer_block_checkpointed_forward"
        )
    return found


def _layer(**by_dispatcher: str) -> Patches:
    """Another MoELayer, by the dispatcher."""

    def patches(args: Any) -> dict[str, Any]:
        layer = by_dispatcher.get(getattr(args, "moe_token_dispatcher_type", None) or "")
        return {f"{_MOE}.moe_layer.MoELayer": f"{_OWN}.adaptor:{layer}"} if layer else {}

    return patches


def _tp_extend_ep(args: Any) -> dict[str, Any]:
    layer = _layer(alltoall_seq="MindSpeedAlltoAllSEQTptoEpMoELayer")(args)
    routing = {f"{_MOE}.router.TopKRouter.routing": f"{_OWN}.common:routing_tp_extend_ep"} if layer else {}
    return routing | ({} if args.moe_alltoall_overlap_comm else layer)


def _check_tp_extend_ep(args: Any) -> None:
    if args.moe_tp_extend_ep:
        needed = args.moe_permutation_async_comm and args.moe_grouped_gemm
        _require(needed and args.moe_expert_capacity_factor is None, "`--moe-tp-extend-ep` can't be on here.")


def _check_shared_experts(args: Any) -> None:
    """n_shared_experts is another name for the size of the shared expert."""
    if args.n_shared_experts and args.moe_shared_expert_intermediate_size is None:
        size = args.moe_ffn_hidden_size or args.ffn_hidden_size
        args.moe_shared_expert_intermediate_size = args.n_shared_experts * size


def _check_overlap(args: Any) -> None:
    dispatcher = args.moe_token_dispatcher_type
    for on, dispatchers in (
        (args.moe_allgather_overlap_comm, {"allgather"}),
        (args.moe_alltoall_overlap_comm, {"alltoall", "alltoall_seq"}),
    ):
        if on:
            asynchronous = args.moe_permutation_async_comm or dispatcher == "alltoall"
            _require(
                dispatcher in dispatchers and args.moe_grouped_gemm and asynchronous,
                "overlap only support with `--moe-grouped-gemm` and its dispatchers.",
            )


def _pre_check_zero_memory(args: Any) -> None:
    """It reads the config bare and so breaks replace()."""
    _require(
        args.moe_zero_memory_num_layers is None or args.moe_zero_memory != "disable",
        "`--moe-zero-memory` must be enabled when using `--moe-zero-memory-num-layers`",
    )


def _check_fb_overlap(args: Any) -> None:
    if args.moe_fb_overlap:
        parallel = args.expert_tensor_parallel_size == 1 and args.expert_model_parallel_size != 1
        _require(
            parallel and args.moe_token_dispatcher_type not in ("allgather", "alltoall_seq"),
            "fb overlap only support alltoall with expert parallelism alone",
        )


def _fb_overlap(args: Any) -> dict[str, Any]:
    own = f"{_OWN}.fb_overlap"
    return {
        **_spec(args),
        "megatron.core.transformer.transformer_block.TransformerBlock.__init__": (
            f"{own}.transformer_block:transformer_block_fb_overlap_init_wrapper"
        ),
        "megatron.core.pipeline_parallel.schedules.get_forward_backward_func": (
            f"{own}.adaptor:get_forward_backward_func_vpp_overlap_wrapper"
        ),
    }


def _spec(args: Any) -> dict[str, Any]:
    spec = "megatron.core.models.gpt.moe_module_specs.get_moe_module_spec"
    return {spec: f"{_OWN}.fb_overlap.adaptor:get_moe_module_spec_wrapper"}


def _check_fix_router(args: Any) -> None:
    if args.fix_router:
        _require(args.expert_model_parallel_size > 1, "fix-router needs expert parallelism")


def _fix_router(args: Any) -> dict[str, Any]:
    own = "mindspeed.core.transformer.moe.moe_utils"
    if not BRANCH.fixes_score_function:
        return {f"{_MOE}.moe_utils.topk_softmax_with_capacity": f"{own}:topk_softmax_with_capacity"}
    names = ("topk_routing_with_score_function", "compute_routing_scores_for_aux_loss")
    return {f"{_MOE}.moe_utils.{name}": f"{own}:{name}_wrapper" for name in names}


def _score_reuse(args: Any) -> dict[str, Any]:
    own = "mindspeed.core.transformer.moe.router_score_reuse"
    return {f"{_MOE}.router.TopKRouter.routing": f"{own}:router_score_reuse_wrapper"}


def _fast_ops_conflict(args: Any) -> bool:
    from mindspeed.core.transformer.moe.moe_npu_fast_ops import CONFLICTS

    return any(getattr(args, name, False) for name in CONFLICTS)


def _check_fast_ops(args: Any) -> None:
    if _fast_ops_conflict(args):
        args.moe_npu_fast_ops = False


def _fast_ops(args: Any) -> dict[str, Any]:
    own = "mindspeed.core.transformer.moe.moe_npu_fast_ops"
    if _fast_ops_conflict(args):
        return {}
    routing = "topk_routing_with_score_function"
    return {
        f"{_MOE}.moe_utils.{routing}": f"{own}:{routing}_scatter_wrapper",
        f"{_MOE}.moe_layer.MoELayer.forward": f"{own}:moe_forward_dispatch_lifetime_wrapper",
        f"{_MOE}.moe_utils.permute": f"{own}:permute_npu_wrapper",
        f"{_MOE}.moe_utils.unpermute": f"{own}:unpermute_npu_wrapper",
    }


FEATURES = [
    Feature(
        arguments={"optimization_level": {"type": int, "choices": [0, 1, 2], "default": 2}},
        before=_before_megatron,
        patches=_of_the_config,
    ),
    Feature(
        "moe_grouped_gemm",
        patches=lambda args: {f"{_MOE}.experts.GroupedMLP": f"{_OWN}.adaptor:MindSpeedGmmExperts"},
    ),
    Feature(
        "moe_tp_extend_ep",
        {"moe_tp_extend_ep": _FLAG, "moe_permutation_async_comm": _FLAG},
        check=_check_tp_extend_ep,
        patches=_tp_extend_ep,
    ),
    Feature(arguments={"n_shared_experts": _NUMBER}, check=_check_shared_experts),
    Feature(
        "moe_allgather_overlap_comm",
        {"moe_allgather_overlap_comm": _FLAG},
        patches=_layer(allgather="MindSpeedAllGatherOverlapMoeLayerAdaptor"),
    ),
    Feature(
        "moe_alltoall_overlap_comm",
        {"moe_alltoall_overlap_comm": _FLAG},
        check=_check_overlap,
        patches=_layer(
            alltoall="MindSpeedAlltoAllOverlapMoeLayerAdaptor",
            alltoall_seq="MindSpeedAlltoAllSeqOverlapMoeLayerAdaptor",
        ),
    ),
    Feature(
        "moe_zero_memory",
        {
            "moe_zero_memory": {"default": "disable", "choices": ["disable", "level0", "level1"]},
            "moe_zero_memory_num_layers": _NUMBER,
        },
        pre_check=_pre_check_zero_memory,
    ),
    Feature(
        "moe_fb_overlap",
        {"moe_fb_overlap": _FLAG},
        needs=("moe_grouped_gemm",),
        excludes=("moe_alltoall_overlap_comm", "overlap_grad_reduce", "moe_tp_extend_ep"),
        check=_check_fb_overlap,
        patches=_fb_overlap,
    ),
    Feature(
        "balanced_moe_experts",
        {"balanced_moe_experts": _FLAG, "balanced_moe_hot_expert_num": {"type": int, "default": 3}},
        needs=("moe_fb_overlap", "moe_grouped_gemm"),
        excludes=("moe_expert_capacity_factor",),
        patches=_spec,
    ),
]
if BRANCH.has_mc2:
    FEATURES.append(
        Feature(
            "moe_alltoall_mc2",
            {"moe_alltoall_mc2": _FLAG},
            excludes=("moe_alltoall_overlap_comm", "moe_allgather_overlap_comm", "moe_fb_overlap"),
            patches=_layer(**dict.fromkeys(("alltoall", "allgather"), "MindSpeedAlltoAllMC2MoeLayerAdaptor")),
        )
    )
if BRANCH.has_fix_router:
    FEATURES.append(
        Feature("fix_router", {"fix_router": _FLAG}, check=_check_fix_router, patches=_fix_router)
    )
if BRANCH.has_score_reuse:
    FEATURES.append(
        Feature("moe_router_score_reuse", {"moe_router_score_reuse": _FLAG}, patches=_score_reuse)
    )
if BRANCH.has_fast_ops:
    off = {"action": "store_false", "dest": "moe_npu_fast_ops", "default": True}
    FEATURES.append(
        Feature("moe_npu_fast_ops", {"no_moe_npu_fast_ops": off}, check=_check_fast_ops, patches=_fast_ops)
    )


class OwnFeaturesManager:
    """What older branches do to all features; their order is the order of patches."""

    FEATURES_LIST: ClassVar[list[Any]] = []

    @classmethod
    def apply_features_pre_patches(cls, args: Any) -> None:
        """Patch what comes before megatron is imported."""
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(args):
                feature.pre_register_patches(feature.patch_manager, args)
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def apply_features_patches(cls, args: Any) -> None:
        for feature in cls.FEATURES_LIST:
            if feature.is_need_apply(args):
                feature.register_patches(feature.patch_manager, args)
        MindSpeedPatchesManager.apply_patches()

    @classmethod
    def register_features_args(cls, parser: ArgumentParser) -> None:
        for feature in cls.FEATURES_LIST:
            feature.register_args(parser)

    @classmethod
    def pre_validate_features_args(cls, args: Any) -> None:
        for feature in cls.FEATURES_LIST:
            feature.pre_validate_args(args)

    @classmethod
    def validate_features_args(cls, args: Any) -> None:
        for feature in cls.FEATURES_LIST:
            feature.validate_args(args)


def _base() -> Any:
    if not BRANCH.over_megatron_adaptor:
        return OwnFeaturesManager
    return importlib.import_module("megatron_adaptor.features_manager.features_manager").FeaturesManager


class MindSpeedFeaturesManager(_base()):  # type: ignore[misc]
    """Takes MindSpeed's features to the others of the list, and its patches alone away."""

    @classmethod
    def remove_patches(cls) -> None:
        for feature in FEATURES:
            feature.pre_patches_applied = False
            feature.patches_applied = False
        MindSpeedPatchesManager.remove_patches()


def _take_up() -> None:
    """Add the features to the list, and their arguments to those that MegatronAdaptor has read by now.

    That they get there is known; how isn't.
    """
    MindSpeedFeaturesManager.FEATURES_LIST += FEATURES
    if BRANCH.over_megatron_adaptor:
        from megatron_adaptor.utils.args_utils import get_mindspeed_args

        read = vars(get_mindspeed_args())
        read.update(vars(get_mindspeed_args(get_defaults=True)) | read)


_take_up()
