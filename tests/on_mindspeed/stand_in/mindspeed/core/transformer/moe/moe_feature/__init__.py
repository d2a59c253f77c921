"""What the layers take from Megatron, bound when this is imported, as in the original."""

from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer as MegatronBaseMoeLayer
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter

BaseMoELayer = MegatronBaseMoeLayer

__all__ = ["BaseMoELayer", "MegatronBaseMoeLayer", "MoELayer", "SequentialMLP", "TopKRouter"]
