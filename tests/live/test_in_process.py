"""Ways in which a live engine computes a row, held against transformers' own router logits. Of the prefix
cache, of preempted requests, of stops and of a start: test_mix.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from live.engine import in_process
from live.families import VOCABULARY
from live.held import assert_right
from npu_replay import RoutedModel, from_vllm
from npu_replay.errors import InvalidRoutes

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


def test_T2_T27_T32_T39_rows_are_what_the_routers_choose(live: Any) -> None:
    """One row a token but the last; a dense first layer has none; none are zeros; none are shifted."""
    outputs = generate(live, [prompt(length, length) for length in (1, 2, 33, 64, 90)])
    assert_all_right(live, outputs)
    known = RoutedModel.of(live.folder)
    assert from_vllm(outputs[0], live.folder)[0].layers == known.layers
    assert known.layers == tuple(
        range(getattr(live.model.config, "first_k_dense_replace", 0), known.num_layers)
    )


def test_several_completions_of_a_prompt(live: Any) -> None:
    (output,) = generate(live, [prompt(4, 50)], n=3)
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    assert_all_right(live, [output])


def test_T31_a_prompt_that_is_cut_into_chunks(live: Any) -> None:
    engine = live.engine.llm_engine
    asked = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add_request("chunks", {"prompt_token_ids": prompt(5, 300)}, asked)
    steps = 0
    found = []
    while engine.has_unfinished_requests():
        found += engine.step()
        steps += not found
    assert steps == (2 if has_cache(live) else 0)  # of 128 tokens each, before that which ends the prompt
    assert_all_right(live, found[-1:])


def test_the_last_output_of_a_stream_has_the_routes(live: Any) -> None:
    """With all the ids, of which it has the last alone."""
    engine = live.engine.llm_engine
    ids = prompt(9, 40)
    asked = SamplingParams(max_tokens=6, ignore_eos=True, output_kind=RequestOutputKind.DELTA)
    engine.add_request("pieces", {"prompt_token_ids": ids}, asked)
    pieces: list[Any] = []
    while engine.has_unfinished_requests():
        pieces += engine.step()
    sampled = [token for piece in pieces for token in piece.outputs[0].token_ids]
    assert len(pieces) == len(sampled) == 6
    with pytest.raises(InvalidRoutes, match="the request isn't finished"):
        from_vllm(pieces[0], live.folder)
    with pytest.raises(InvalidRoutes, match="rows for more tokens"):
        from_vllm(pieces[-1], live.folder)
    (routes,) = from_vllm(pieces[-1], live.folder, output_token_ids=sampled)
    assert_right(live.model, [*ids, *sampled], routes)


def test_T11_an_engine_that_was_started_without_the_switch(live: Any) -> None:
    """Its outputs have nothing where the routes would be."""
    (output,) = generate(live, [prompt(8, 20)])
    output.outputs[0].routed_experts = None
    with pytest.raises(InvalidRoutes, match=r"no routes.*enable_return_routed_experts"):
        from_vllm(output, live.folder)


def test_T19_more_experts_than_a_byte_can_name(saved: Any) -> None:
    model, folder = saved("Qwen3Moe", num_experts=300, num_hidden_layers=4, num_experts_per_tok=8)
    llm = in_process(folder)
    (output,) = llm.generate(
        [{"prompt_token_ids": prompt(8, 80)}], SamplingParams(max_tokens=8), use_tqdm=False
    )
    (routes,) = from_vllm(output, folder)
    assert routes.ids.max() > 255
    assert_right(model, [*output.prompt_token_ids, *output.outputs[0].token_ids], routes)
