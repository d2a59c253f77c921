"""Ways in which a live engine computes a row, held against transformers' own router logits. Of the prefix
cache, chunks, several completions, preempted requests, stops and a start: test_mix.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm import SamplingParams

from live.engine import Live, in_process
from live.families import VOCABULARY
from live.held import assert_right
from npu_replay import from_vllm


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCABULARY, length).tolist()


def generate(live: Any, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    asked = SamplingParams(**{"max_tokens": 24, "temperature": 1.0, "ignore_eos": True, **sampling})
    return live.engine.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)


def assert_all_right(live: Any, outputs: list[Any]) -> None:
    for output in outputs:
        for completion, routes in zip(output.outputs, from_vllm(output, live.folder), strict=True):
            assert_right(live.model, [*output.prompt_token_ids, *completion.token_ids], routes)


def test_T19_more_experts_than_a_byte_can_name(saved: Any) -> None:
    model, folder = saved("Qwen3Moe", num_experts=300, num_hidden_layers=4, num_experts_per_tok=8)
    wide = Live(model, folder, in_process(folder))
    outputs = generate(wide, [prompt(8, 80)])
    assert outputs[0].outputs[0].routed_experts.max() > 255
    assert_all_right(wide, outputs)
