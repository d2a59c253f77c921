"""A live vLLM 0.30.0 that serves an adapter (LoRA), by hand: docs/dev/tried.md has the command.

vLLM takes its Triton experts where adapters are on, so this wants the back end in tests/triton_cpu, and two
operators that vLLM has for devices alone.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import vllm._custom_ops as operators
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from live.engine import in_process
from live.families import VOCABULARY
from live.held import assert_right
from npu_replay import from_vllm

TARGETS = ["q_proj", "v_proj", "o_proj"]
FUSED = ["qkv_proj"]


def align(
    topk_ids: Any, experts: int, block: int, sorted_ids: Any, expert_ids: Any, padded: Any, _: Any = None
) -> None:
    """The places of each expert's tokens one after another, each expert's in whole blocks."""
    flat = topk_ids.flatten()
    place = 0
    sorted_ids.fill_(flat.numel())
    for expert in range(experts):
        found = (flat == expert).nonzero().flatten()
        blocks = -(-len(found) // block)
        sorted_ids[place : place + len(found)] = found
        expert_ids[place // block : place // block + blocks] = expert
        place += blocks * block
    padded.fill_(place)


def tuned(model: Any, folder: Path) -> Any:
    """Save an adapter of `model` that changes what it attends to; returns the model with it merged."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(r=8, lora_alpha=16, target_modules=TARGETS))
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            weight.data.normal_(0, 0.2)
    adapted.save_pretrained(folder)
    return adapted.merge_and_unload().eval()


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral", "Olmoe"])
def test_an_adapter_has_routes_of_its_own(
    family: str, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "moe_align_block_size", align)
    monkeypatch.setattr(operators, "moe_sum", lambda rows, out: out.copy_(rows.sum(1)))
    model, folder = saved(family)
    with_adapter = tuned(model, tmp_path)
    # Two slots: with one, requests without the adapter came out otherwise under the interpreter.
    llm = in_process(
        folder, enable_lora=True, max_loras=2, max_lora_rank=8, lora_target_modules=[*TARGETS, *FUSED]
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, VOCABULARY, length).tolist() for length in (20, 50, 170, 33)]
    adapter = LoRARequest("tuned", 1, str(tmp_path))
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        SamplingParams(max_tokens=24, ignore_eos=True, temperature=0),
        lora_request=[adapter, None, adapter, None],
    )
    for number, output in enumerate(outputs):
        (routes,) = from_vllm(output, folder)
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        right, wrong = (with_adapter, model) if number % 2 == 0 else (model, with_adapter)
        assert_right(right, tokens, routes)
        with pytest.raises(AssertionError, match="token-layers are wrong"):
            assert_right(wrong, tokens, routes)
