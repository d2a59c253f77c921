"""What MindSpeed always does: torch's side effects, dummies of CUDA packages, and the config's wrappers."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

import torch

from mindspeed.branch import BRANCH
from mindspeed.features_manager.feature import MindSpeedFeature

_CONFIG = "megatron.core.transformer.transformer_config"
_DUMMIES = (  # what Megatron's Transformer Engine extension asks for, so that it can be imported
    "transformer_engine.pytorch.LayerNorm",
    "transformer_engine.pytorch.LayerNormLinear",
    "transformer_engine.pytorch.DotProductAttention",
    "transformer_engine.pytorch.Linear",
    "transformer_engine.pytorch.GroupedLinear",
    "transformer_engine.pytorch.distributed.CudaRNGStatesTracker",
    "transformer_engine.pytorch.distributed.activation_recompute_forward",
    "transformer_engine.pytorch.fp8.FP8GlobalStateManager",
    "transformer_engine.pytorch.fp8.fp8_autocast",
    "transformer_engine.pytorch.ops.Sequential",
    "transformer_engine.pytorch.ops.FusibleOperation",
    "transformer_engine.pytorch.permutation.moe_permute",
    "transformer_engine.pytorch.permutation.moe_permute_with_probs",
    "transformer_engine.pytorch.permutation.moe_sort_chunks_by_index",
    "transformer_engine.pytorch.permutation.moe_sort_chunks_by_index_with_probs",
    "transformer_engine.pytorch.permutation.moe_unpermute",
    "transformer_engine.pytorch.tensor.QuantizedTensor",
    "transformer_engine.common.recipe.DelayedScaling",
    "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32",
    "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp16",
)


class TELinear(torch.nn.Linear):
    """In the place of a class that only Transformer Engine has."""


class RequirementsBasicFeature(MindSpeedFeature):
    """Patches that come before megatron is imported: torch, and packages that only CUDA has."""

    def __init__(self) -> None:
        super().__init__("requirements-basic", optimization_level=0)

    def register_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--optimization-level", type=int, choices=[0, 1, 2], default=2)

    def pre_register_patches(self, patch_manager: Any, args: Any) -> None:
        from mindspeed.core.megatron_basic import requirements_basic as basic

        patch_manager.register_patch("torch.compile", basic.dummy_compile)
        patch_manager.register_patch("torch.jit.script", basic.dummy_compile)
        patch_manager.register_patch("importlib.metadata.version", basic.version_wrapper)
        for name in _DUMMIES:
            patch_manager.register_patch(name, torch.nn.Module, create_dummy=True)
        patch_manager.register_patch("torch.Tensor.view", basic.ensure_contiguous_wrapper)
        patch_manager.register_patch(
            "torch.distributed.all_reduce", basic.torch_all_reduce_double_dtype_bypass_wrapper
        )


class MegatronBasicFeature(MindSpeedFeature):
    """The wrappers of the config: the reason why an unknown argument is no error under MindSpeed."""

    def __init__(self) -> None:
        super().__init__("megatron-basic", optimization_level=0)

    def register_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--use-fused-rmsnorm", action="store_true")
        parser.add_argument("--use-fused-swiglu", action="store_true")

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        from mindspeed.core.megatron_basic import arguments_basic as basic

        init, post_init = basic.transformer_config_init_wrapper, basic.transformer_config_post_init_wrapper
        patch_manager.register_patch(f"{_CONFIG}.TransformerConfig.__init__", init)
        patch_manager.register_patch(f"{_CONFIG}.MLATransformerConfig.__init__", init)
        patch_manager.register_patch(f"{_CONFIG}.TransformerConfig.__post_init__", post_init)
        if BRANCH.init_subclass:
            patch_manager.register_patch(
                f"{_CONFIG}.TransformerConfig.__init_subclass__",
                classmethod(basic.transformer_config_init_subclass),
            )
        if BRANCH.replaces_te_linear:
            # Where Megatron came first, it is a mock that no isinstance() takes.
            patch_manager.register_patch("megatron.core.extensions.transformer_engine.TELinear", TELinear)
        if BRANCH.replaces_checkpointed_forward:
            from mindspeed.core.memory.common import transformer_block_checkpointed_forward

            patch_manager.register_patch(
                "megatron.core.transformer.transformer_block.TransformerBlock._checkpointed_forward",
                transformer_block_checkpointed_forward,
            )
