"""Ways in which a live engine computes a row, held against transformers' own router logits. Of the prefix
cache, chunks, several completions, preempted requests, stops and a start: test_mix.py."""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm import SamplingParams

from live.engine import in_process
from live.families import VOCABULARY
from live.held import assert_right
from npu_replay import from_vllm

RNG = np.random.default_rng


def prompt(seed: int, length: int) -> list[int]:
    ids: list[int] = RNG(seed).integers(3, VOCABULARY, length).tolist()
    return ids


def generate(live: Any, prompts: list[list[int]], **sampling: Any) -> list[Any]:
    asked = SamplingParams(**{"max_tokens": 24, "temperature": 1.0, "ignore_eos": True, **sampling})
    found: list[Any] = live.engine.generate(
        [{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False
    )
    return found


def assert_all_right(live: Any, outputs: list[Any]) -> None:
    for output in outputs:
        for completion, routes in zip(output.outputs, from_vllm(output, live.folder), strict=True):
            assert_right(live.model, [*output.prompt_token_ids, *completion.token_ids], routes)


def has_cache(live: Any) -> bool:
    """A prefix cache, and prompts in chunks? Without AMX vLLM turns both off for DeepSeek's attention."""
    found = bool(live.engine.llm_engine.vllm_config.cache_config.enable_prefix_caching)
    assert found or "Deepseek" in type(live.model).__name__
    return found


def counter(live: Any, name: str) -> int:
    """One of vLLM's own counters, «vllm:num_preemptions»."""
    return sum(metric.value for metric in live.engine.get_metrics() if metric.name == name)


def test_T19_more_experts_than_a_byte_can_name(saved: Any) -> None:
    model, folder = saved("Qwen3Moe", num_experts=300, num_hidden_layers=4, num_experts_per_tok=8)
    llm = in_process(folder)
    (output,) = llm.generate(
        [{"prompt_token_ids": prompt(8, 80)}], SamplingParams(max_tokens=8), use_tqdm=False
    )
    (routes,) = from_vllm(output, folder)
    assert routes.ids.max() > 255
    assert_right(model, [*output.prompt_token_ids, *output.outputs[0].token_ids], routes)
