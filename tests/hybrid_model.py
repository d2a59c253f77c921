"""A small HybridModel (MambaModel up to 0.17) of real Megatron-core, where its patterns have E.

It is smoke's, with layers that no accelerator is needed for in the place of `M` layers (the kernels
of a state space run on a GPU only), and with multi-token prediction.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from npu_replay.smoke import megatron_model
from npu_replay.smoke.megatron_model import hybrid_lacks as missing
from npu_replay.smoke.model import Norm

__all__ = ["chunks", "config", "labels", "missing", "model", "symbols"]


def symbols(pattern: str) -> str:
    """One a layer of the main pattern."""
    return pattern.split("/")[0].replace("|", "")


def labels(pattern: str, moe: list[int] | tuple[int, ...]) -> dict[int, int]:
    """By the place of each E in the main pattern, the MoE layer of a Hugging Face config that it is."""
    places = [place for place, symbol in enumerate(symbols(pattern)) if symbol == "E"]
    return dict(zip(places, moe, strict=True))


class StateSpace(nn.Module):
    """In the place of an M layer's mixer."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.map = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return self.map(hidden), None


def config(pattern: str, **changes: Any) -> Any:
    """The config of megatron_model for this pattern."""
    return megatron_model.config(**{"num_layers": len(symbols(pattern))} | changes)


def model(cfg: Any, pattern: str, *, norm: type = Norm, **about: Any) -> Any:
    """Build a HybridModel, or a chunk of one; about: arguments of smoke's."""
    parts = {"mamba_layer": _state_space(norm)} | ({"mtp_block_spec": _mtp(norm)} if "/" in pattern else {})
    return megatron_model.hybrid(cfg, pattern, norm=norm, parts=parts, **about)


def chunks(cfg: Any, pattern: str, **about: Any) -> list[Any]:
    """This pipeline rank's chunks, one for each virtual stage; about: arguments of `model`."""
    return megatron_model.chunks(cfg, build=model, pattern=pattern, **about)


def _state_space(norm: type) -> Any:
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    mixer = ModuleSpec(module=StateSpace)
    parts = MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=get_bias_dropout_add)
    return ModuleSpec(module=MambaLayer, submodules=parts)


def _mtp(norm: type) -> Any:
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer import multi_token_prediction as mtp
    from megatron.core.transformer.spec_utils import ModuleSpec

    parts = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=ColumnParallelLinear, mtp_model_layer=None, layer_norm=norm
    )
    layer = ModuleSpec(module=mtp.MultiTokenPredictionLayer, submodules=parts)
    return ModuleSpec(
        module=mtp.MultiTokenPredictionBlock,
        submodules=mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[layer]),
    )
