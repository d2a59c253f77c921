"""Each way in which a live engine computes a row, held against transformers' own router logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from live.engine import in_process
from live.families import VOCABULARY
from live.held import assert_right
from npu_replay import RoutedModel, from_vllm, observe, replay
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


def test_T23_tokens_from_the_prefix_cache_have_rows(live: Any) -> None:
    shared = prompt(1, 100)
    generate(live, [shared])
    outputs = generate(live, [[*shared, *prompt(number, 9)] for number in (2, 3)])
    assert [output.num_cached_tokens for output in outputs] == [96 if has_cache(live) else 0] * 2
    assert_all_right(live, outputs)


def test_several_completions_of_a_prompt(live: Any) -> None:
    (output,) = generate(live, [prompt(4, 50)], n=3)
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    assert_all_right(live, [output])


def test_T31_a_prompt_that_is_cut_into_chunks(live: Any) -> None:
    engine = live.engine.llm_engine
    asked = SamplingParams(max_tokens=4, ignore_eos=True)
    engine.add_request("chunks", {"prompt_token_ids": prompt(5, 300)}, asked)
    steps, found = 0, []
    while engine.has_unfinished_requests():
        found += engine.step()
        steps += not found
    assert steps == (2 if has_cache(live) else 0)  # of 128 tokens each, before that which ends the prompt
    assert_all_right(live, found[-1:])


def test_the_last_output_of_a_stream_has_the_routes(live: Any) -> None:
    """With all the ids, of which it has the last alone."""
    engine, ids = live.engine.llm_engine, prompt(9, 40)
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


def test_T29_requests_that_were_preempted(live: Any) -> None:
    """Rows of tokens that ran twice are those of the tokens, whoever had their blocks in between."""
    before = counter(live, "vllm:num_preemptions")
    outputs = generate(live, [prompt(20 + number, 30) for number in range(16)], max_tokens=160)
    assert counter(live, "vllm:num_preemptions") >= before + 3
    assert_all_right(live, outputs)


@pytest.mark.parametrize("n", [1, 2])
def test_stop_strings_and_stop_ids(live: Any, n: int) -> None:
    (free,) = generate(live, [prompt(6, 30)], temperature=0.0)
    third, text = free.outputs[0].token_ids[12], free.outputs[0].text.split()[12]
    for asked in ({"stop": [f" {text} "]}, {"stop": [text], "include_stop_str_in_output": True}):
        (output,) = generate(live, [prompt(6, 30)], temperature=0.0 if n == 1 else 1.0, n=n, **asked)
        assert n > 1 or (output.outputs[0].finish_reason == "stop" and output.outputs[0].stop_reason)
        assert_all_right(live, [output])
    (output,) = generate(live, [prompt(6, 30)], temperature=0.0, stop_token_ids=[third])
    assert output.outputs[0].finish_reason == "stop"
    assert_all_right(live, [output])


@pytest.mark.parametrize("start", [1, 40, 64])
def test_rows_from_a_start_on(live: Any, start: int) -> None:
    (output,) = generate(live, [prompt(7, 70)], routed_experts_prompt_start=start)
    (routes,) = from_vllm(output, live.folder, start=start)
    assert_right(live.model, [*output.prompt_token_ids, *output.outputs[0].token_ids], routes, start)


def test_T11_an_engine_that_was_started_without_the_switch(saved: Any) -> None:
    _, folder = saved("Qwen3Moe")
    llm = in_process(folder, capture=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt(8, 20)}], use_tqdm=False)
    with pytest.raises(InvalidRoutes, match=r"no routes.*enable_return_routed_experts"):
        from_vllm(output, folder)


def test_T19_more_experts_than_a_byte_can_name(saved: Any) -> None:
    model, folder = saved("Qwen3Moe", num_experts=300, num_hidden_layers=4, num_experts_per_tok=8)
    llm = in_process(folder)
    (output,) = llm.generate(
        [{"prompt_token_ids": prompt(8, 80)}], SamplingParams(max_tokens=8), use_tqdm=False
    )
    (routes,) = from_vllm(output, folder)
    assert routes.ids.max() > 255
    assert_right(model, [*output.prompt_token_ids, *output.outputs[0].token_ids], routes)


def test_T36_T39_r3_of_a_bfloat16_engine_in_a_float32_trainer(saved: Any) -> None:
    """The trainer routes as the engine did, its log-probs come nearer, and belong to the same tokens."""
    model, folder = saved("Qwen3Moe")
    llm = in_process(folder, dtype="bfloat16")
    asked = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": prompt(50 + number, 30)} for number in range(8)]
    native, replayed, shifted = [], [], []
    for output in llm.generate(prompts, asked, use_tqdm=False):
        (routes,), (completion,) = from_vllm(output, folder), output.outputs
        tokens = torch.tensor([[*output.prompt_token_ids, *completion.token_ids]])
        theirs = torch.tensor(
            [one[token].logprob for one, token in zip(completion.logprobs, completion.token_ids, strict=True)]
        )

        def look(tokens: Any = tokens, theirs: Any = theirs, routes: Any = routes) -> tuple[Any, float]:
            """The trainer's log-probs less the engine's, and the share of token-layers that differ."""
            with torch.no_grad(), observe(model) as observation:
                logits = model(tokens, use_cache=False).logits[0, :-1].log_softmax(1)
            ours = logits.gather(1, tokens[0, 1:, None])[-len(theirs) :, 0]
            shown = observation.shown[0].ids.sort().values[:-1] != routes.ids.sort().values[:-1]
            return ours - theirs, shown.any(2).float().mean().item()

        native.append(look())
        with replay(model, [routes]):
            replayed.append(look())
        shifted.append(native[-1][0] + theirs - theirs.roll(1))
    assert all(mismatch > 0.005 for _, mismatch in native)
    assert all(mismatch == 0 for _, mismatch in replayed)
    assert k3(replayed) < k3(native) / 2
    assert k3([(one, 0) for one in shifted]) > 100 * k3(native)


def k3(found: list[Any]) -> float:
    """An estimate of the KL, in nats: the mean of exp(d) - d - 1."""
    differences = torch.cat([difference for difference, _ in found])
    return float((differences.exp() - differences - 1).mean())
