"""The names of the fused permutation: a config with moe_permute_fusion asks whether they are there."""

from __future__ import annotations

from typing import Any


def moe_permute(*_: Any, **__: Any) -> Any:
    """Stand for a kernel.

    MindSpeed replaces what calls it.
    """
    raise NotImplementedError("the stand-in of TransformerEngineNPU permutes nothing")


moe_permute_with_probs = moe_permute
moe_unpermute = moe_permute
moe_sort_chunks_by_index = moe_permute
moe_sort_chunks_by_index_with_probs = moe_permute
