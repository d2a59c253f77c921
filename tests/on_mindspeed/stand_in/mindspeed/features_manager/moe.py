"""The features of mixture-of-experts layers: what each replaces, and the rules it holds every config to."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from mindspeed.features_manager.feature import MindSpeedFeature

_MOE_LAYER = "megatron.core.transformer.moe.moe_layer.MoELayer"
_SPEC = "megatron.core.models.gpt.moe_module_specs.get_moe_module_spec"


def _require(holds: Any, rule: str) -> None:
    if not holds:
        raise AssertionError(rule)


class MoEGmmFeature(MindSpeedFeature):
    """moe_grouped_gemm: GroupedMLP is replaced."""

    def __init__(self) -> None:
        super().__init__("moe-grouped-gemm")

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        from mindspeed.core.transformer.moe.moe_feature.adaptor import MindSpeedGmmExperts

        patch_manager.register_patch("megatron.core.transformer.moe.experts.GroupedMLP", MindSpeedGmmExperts)


class MoETpExtendEpFeature(MindSpeedFeature):
    """moe_tp_extend_ep with alltoall_seq: TopKRouter.routing is replaced."""

    def __init__(self) -> None:
        super().__init__("moe-tp-extend-ep")

    def register_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--moe-tp-extend-ep", action="store_true")
        parser.add_argument("--moe-permutation-async-comm", action="store_true")

    def validate_args(self, args: Any) -> None:
        if args.moe_tp_extend_ep:
            _require(
                args.moe_permutation_async_comm and args.moe_grouped_gemm,
                "`--moe-tp-extend-ep` needs `--moe-permutation-async-comm` and `--moe-grouped-gemm`.",
            )
            _require(
                args.moe_expert_capacity_factor is None,
                "`--moe-tp-extend-ep` only support when moe_expert_capacity_factor is None.",
            )

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        if getattr(args, "moe_token_dispatcher_type", None) != "alltoall_seq":
            return
        from mindspeed.core.transformer.moe.moe_feature.adaptor import MindSpeedAlltoAllSEQTptoEpMoELayer
        from mindspeed.core.transformer.moe.moe_feature.common import routing_tp_extend_ep

        routing = "megatron.core.transformer.moe.router.TopKRouter.routing"
        patch_manager.register_patch(routing, routing_tp_extend_ep)
        if not args.moe_alltoall_overlap_comm:
            patch_manager.register_patch(_MOE_LAYER, MindSpeedAlltoAllSEQTptoEpMoELayer)


class MoESharedExpertsFeature(MindSpeedFeature):
    """n_shared_experts: another name for the size of the shared expert."""

    def __init__(self) -> None:
        super().__init__("n-shared-experts", optimization_level=0)

    def register_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--n-shared-experts", type=int, default=None)

    def validate_args(self, args: Any) -> None:
        if args.n_shared_experts and args.moe_shared_expert_intermediate_size is None:
            size = args.moe_ffn_hidden_size or args.ffn_hidden_size
            args.moe_shared_expert_intermediate_size = args.n_shared_experts * size


class MoEAllGatherOverLapFeature(MindSpeedFeature):
    """moe_allgather_overlap_comm: MoELayer is replaced; the router runs inside a custom autograd Function."""

    def __init__(self) -> None:
        super().__init__("moe-allgather-overlap-comm")

    def register_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--moe-allgather-overlap-comm", action="store_true")

    def validate_args(self, args: Any) -> None:
        if args.moe_allgather_overlap_comm:
            rule = "`--moe-allgather-overlap-comm` only support with `--moe-"
            _require(
                args.moe_token_dispatcher_type == "allgather", rule + "token-dispatcher-type allgather`."
            )
            _require(args.moe_permutation_async_comm, rule + "permutation-async-comm`.")
            _require(args.moe_grouped_gemm, rule + "grouped-gemm`.")

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        if getattr(args, "moe_token_dispatcher_type", None) == "allgather":
            from mindspeed.core.transformer.moe.moe_feature import adaptor

            patch_manager.register_patch(_MOE_LAYER, adaptor.MindSpeedAllGatherOverlapMoeLayerAdaptor)


class MoEAlltoAllOverLapFeature(MindSpeedFeature):
    """moe_alltoall_overlap_comm: the same, for the alltoall and alltoall_seq dispatchers."""

    def __init__(self) -> None:
        super().__init__("moe-alltoall-overlap-comm")

    def register_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--moe-alltoall-overlap-comm", action="store_true")

    def validate_args(self, args: Any) -> None:
        if args.moe_alltoall_overlap_comm:
            rule = "`--moe-alltoall-overlap-comm` only support with `--moe-"
            dispatchers = ("alltoall", "alltoall_seq")
            _require(
                args.moe_token_dispatcher_type in dispatchers, rule + "token-dispatcher-type alltoall(_seq)`."
            )
            _require(args.moe_grouped_gemm, rule + "grouped-gemm`.")
            if args.moe_token_dispatcher_type == "alltoall_seq":
                _require(args.moe_permutation_async_comm, rule + "permutation-async-comm`.")

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        from mindspeed.core.transformer.moe.moe_feature import adaptor

        layers = {
            "alltoall": adaptor.MindSpeedAlltoAllOverlapMoeLayerAdaptor,
            "alltoall_seq": adaptor.MindSpeedAlltoAllSeqOverlapMoeLayerAdaptor,
        }
        layer = layers.get(getattr(args, "moe_token_dispatcher_type", ""))
        if layer is not None:
            patch_manager.register_patch(_MOE_LAYER, layer)


class MoEZeroMemoryFeature(MindSpeedFeature):
    """moe_zero_memory: only its check is played, which reads the config bare and so breaks replace()."""

    def __init__(self) -> None:
        super().__init__("moe-zero-memory")

    def register_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--moe-zero-memory", default="disable", choices=["disable", "level0", "level1"])
        parser.add_argument("--moe-zero-memory-num-layers", type=int, default=None)

    def is_need_apply(self, args: Any) -> Any:
        return False

    def pre_validate_args(self, args: Any) -> None:
        _require(
            args.moe_zero_memory_num_layers is None or args.moe_zero_memory != "disable",
            "`--moe-zero-memory` must be enabled when using `--moe-zero-memory-num-layers`",
        )


class MoEFwdBwdOverlapFeature(MindSpeedFeature):
    """moe_fb_overlap: forward of a micro-batch and backward of the one before it, layer by layer."""

    def __init__(self) -> None:
        super().__init__("moe-fb-overlap")

    def register_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--moe-fb-overlap", action="store_true")
        parser.add_argument("--moe-unperm2-mem-optim-swap", action="store_true")

    def validate_args(self, args: Any) -> None:
        for other in ("moe_alltoall_overlap_comm", "overlap_grad_reduce", "moe_tp_extend_ep"):
            self.incompatible_check(args, other)
        self.dependency_check(args, "moe_grouped_gemm")
        if args.moe_fb_overlap:
            _require(
                args.moe_token_dispatcher_type not in ("allgather", "alltoall_seq"),
                "The fb overlap feature do not support allgather and alltoall_seq dispatcher.",
            )
            _require(
                args.expert_tensor_parallel_size == 1 and args.expert_model_parallel_size != 1,
                "fb overlap only support expert-tensor-parallel-size=1 and expert-model-parallel-size > 1",
            )

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        from mindspeed.core.transformer.moe.moe_feature.fb_overlap import adaptor, transformer_block

        block = "megatron.core.transformer.transformer_block.TransformerBlock.__init__"
        schedule = "megatron.core.pipeline_parallel.schedules.get_forward_backward_func"
        patch_manager.register_patch(_SPEC, adaptor.get_moe_module_spec_wrapper)
        patch_manager.register_patch(block, transformer_block.transformer_block_fb_overlap_init_wrapper)
        patch_manager.register_patch(schedule, adaptor.get_forward_backward_func_vpp_overlap_wrapper)


class BalancedMoEFeature(MindSpeedFeature):
    """balanced_moe_experts: moe_fb_overlap with another layer."""

    def __init__(self) -> None:
        super().__init__("balanced-moe-experts")

    def register_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--balanced-moe-experts", action="store_true")
        parser.add_argument("--balanced-moe-hot-expert-num", type=int, default=3)

    def validate_args(self, args: Any) -> None:
        self.dependency_check(args, "moe_fb_overlap")
        self.dependency_check(args, "moe_grouped_gemm")
        self.incompatible_check(args, "moe_expert_capacity_factor")

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        from mindspeed.core.transformer.moe.moe_feature.fb_overlap import adaptor

        patch_manager.register_patch(_SPEC, adaptor.get_moe_module_spec_wrapper)


class MoEAlltoAllMC2Feature(MindSpeedFeature):
    """moe_alltoall_mc2: MoELayer is replaced; the router is called as a module, in plain forward."""

    def __init__(self) -> None:
        super().__init__("moe-alltoall-mc2")

    def register_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--moe-alltoall-mc2", action="store_true")

    def validate_args(self, args: Any) -> None:
        for other in ("moe_alltoall_overlap_comm", "moe_allgather_overlap_comm", "moe_fb_overlap"):
            self.incompatible_check(args, other)

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        if hasattr(args, "moe_token_dispatcher_type"):
            from mindspeed.core.transformer.moe.moe_feature import adaptor

            patch_manager.register_patch(_MOE_LAYER, adaptor.MindSpeedAlltoAllMC2MoeLayerAdaptor)


class MoEFixRouterFeature(MindSpeedFeature):
    """fix_router: every token gets the next experts in turn, whatever the scores say."""

    def __init__(self) -> None:
        super().__init__("fix-router")

    def register_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--fix-router", action="store_true")

    def validate_args(self, args: Any) -> None:
        if args.fix_router:
            _require(
                args.expert_model_parallel_size > 1,
                "when enable fix-router, expert_model_parallel_size must be greater than 1",
            )

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        from mindspeed.core.transformer.moe.moe_utils import topk_softmax_with_capacity

        patch_manager.register_patch(
            "megatron.core.transformer.moe.moe_utils.topk_softmax_with_capacity", topk_softmax_with_capacity
        )
