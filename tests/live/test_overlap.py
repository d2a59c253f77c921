"""Rows of a live engine in bfloat16, for a trainer in float32: right ones are taken, wrong ones refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm import SamplingParams

from judged_rows import check, verdict
from live.engine import Live, in_process
from live.families import FAMILIES
from live.test_in_process import prompt
from npu_replay import RoutedExperts, from_vllm, observe, replay

NEAR = ("Qwen3Moe", "DeepseekV3")
"""One that chooses by groups, and one that doesn't; the others are `long`."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(one, marks=[pytest.mark.long] * (one not in NEAR)) for one in FAMILIES],
)
def coarse(request: pytest.FixtureRequest, saved: Any) -> Live:
    """An engine in bfloat16, and the model in float32."""
    model, folder = saved(request.param)
    return Live(model, folder, in_process(folder, dtype="bfloat16"))


def test_right_rows_are_taken_and_wrong_ones_refused(coarse: Live) -> None:
    model = coarse.model
    folder = coarse.folder
    llm = coarse.engine
    asked = SamplingParams(max_tokens=160, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt(70 + number, 50)} for number in range(2)]
    samples: list[tuple[torch.Tensor, RoutedExperts]] = []
    for output in llm.generate(prompts, asked, use_tqdm=False):
        (routes,) = from_vllm(output, folder)
        tokens = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])
        assert isinstance(verdict(lambda tokens=tokens: model(tokens, use_cache=False), model, routes), float)
        samples.append((tokens[:, :-1], routes.take(range(len(routes) - 1))))
    (tokens, routes), (_, other) = samples
    table = check(lambda: model(tokens, use_cache=False), model, {"bfloat16, live": routes}, other)
    print(f"\n{type(model).__name__}, {len(routes)} rows of a live vLLM", *table, sep="\n")


@pytest.mark.parametrize("coarse", ["Qwen3Moe"], indirect=True)
def test_T36_T39_r3_of_a_bfloat16_engine_in_a_float32_trainer(coarse: Live) -> None:
    """The trainer routes as the engine did, its log-probs come nearer, and belong to the same tokens."""
    model = coarse.model
    folder = coarse.folder
    llm = coarse.engine
    asked = SamplingParams(max_tokens=60, ignore_eos=True, logprobs=0)
    prompts = [{"prompt_token_ids": prompt(50 + number, 30)} for number in range(8)]
    native = []
    replayed = []
    shifted = []
    for output in llm.generate(prompts, asked, use_tqdm=False):
        (routes,) = from_vllm(output, folder)
        (completion,) = output.outputs
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
