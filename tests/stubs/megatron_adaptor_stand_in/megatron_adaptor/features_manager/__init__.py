"""The features that the stand-in has."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from megatron_adaptor.features_manager.mindspeed_feature import MindSpeedFeature

_CONFIG = "megatron.core.transformer.transformer_config"


class RequirementsFeature(MindSpeedFeature):
    """What is changed in torch, before Megatron is imported."""

    def __init__(self) -> None:
        super().__init__("requirements-basic", optimization_level=0)

    def register_args(self, parser: ArgumentParser) -> None:
        parser.add_argument("--optimization-level", type=int, choices=[0, 1, 2], default=2)
        parser.add_argument("--use-flash-attn", action="store_true")

    def pre_register_patches(self, patch_manager: Any, args: Any) -> None:
        from megatron_adaptor.patches.megatron import megatron_basic

        patch_manager.register_patch("torch.compile", megatron_basic.dummy_compile)
        patch_manager.register_patch("torch.jit.script", megatron_basic.dummy_compile)
        patch_manager.register_patch("torch.Tensor.view", megatron_basic.ensure_contiguous_wrapper)
        all_reduce = megatron_basic.torch_all_reduce_double_dtype_bypass_wrapper
        patch_manager.register_patch("torch.distributed.all_reduce", all_reduce)
        patch_manager.register_patch("importlib.metadata.version", megatron_basic.version_wrapper)


class TransformerConfigFeature(MindSpeedFeature):
    """The wrappers of the config: the reason why an unknown argument is no error under MegatronAdaptor."""

    def __init__(self) -> None:
        super().__init__("transformer-config", optimization_level=0)

    def register_patches(self, patch_manager: Any, args: Any) -> None:
        from megatron_adaptor.patches.megatron import transformer_config

        init = transformer_config.transformer_config_init_wrapper
        patch_manager.register_patch(f"{_CONFIG}.TransformerConfig.__init__", init)
        patch_manager.register_patch(f"{_CONFIG}.MLATransformerConfig.__init__", init)
        post_init = transformer_config.transformer_config_post_init_wrapper
        patch_manager.register_patch(f"{_CONFIG}.TransformerConfig.__post_init__", post_init)


def create_features_list() -> list[MindSpeedFeature]:
    return [RequirementsFeature(), TransformerConfigFeature()]
