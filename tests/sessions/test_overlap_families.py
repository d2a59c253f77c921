"""Right rows are taken and wrong ones refused, on families of transformers. -s prints a table of them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import npu_replay
from judged_rows import check, rounded
from npu_replay import RoutedExperts

pytest.importorskip("transformers")

from live.families import VOCABULARY, make

SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE, top-4 of 32": ("Qwen3Moe", {}),
    "Qwen3-MoE, top-8 of 128": ("Qwen3Moe", {"num_experts": 128, "num_experts_per_tok": 8}),
    "Qwen3-MoE, top-1 of 16": ("Qwen3Moe", {"num_experts": 16, "num_experts_per_tok": 1}),
    "Mixtral, top-2 of 8": ("Mixtral", {"num_hidden_layers": 8}),
    "OLMoE, top-8 of 64": ("Olmoe", {}),
    "DeepSeek-V3, top-6 of 64 in groups": ("DeepseekV3", {}),
}


def recorded(model: Any, tokens: torch.Tensor) -> RoutedExperts:
    with torch.no_grad(), npu_replay.record(model, inputs=False) as recording:
        model(tokens, use_cache=False)
    return recording.routes[0]


@pytest.mark.slow
@pytest.mark.choice
@pytest.mark.parametrize("length", [128, 600])
@pytest.mark.parametrize("size", SIZES)
def test_right_rows_are_taken_and_wrong_ones_refused(size: str, length: int) -> None:
    family, changes = SIZES[size]
    model = make(family, **changes)
    generator = torch.Generator().manual_seed(5)
    tokens, other = torch.randint(3, VOCABULARY, (2, 1, length), generator=generator)
    right = {
        "float32": recorded(model, tokens),
        "bfloat16": recorded(copy.deepcopy(model).bfloat16(), tokens),
        "8 bits": recorded(rounded(copy.deepcopy(model), 8), tokens),
        "4 bits": recorded(rounded(copy.deepcopy(model), 4), tokens),
    }
    table = check(lambda: model(tokens, use_cache=False), model, right, recorded(model, other))
    print(f"\n{size}, {length} rows", *table, sep="\n")
