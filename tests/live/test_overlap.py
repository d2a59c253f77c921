"""Rows of a live engine in bfloat16, for a trainer in float32: right ones are taken, wrong ones refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm import SamplingParams

from judged_rows import check, verdict
from live.engine import Live, in_process
from live.families import FAMILIES, prompt
from npu_replay import RoutedExperts, from_vllm

NEAR = "DeepseekV3"
"""Its experts lie closest, since it chooses by groups; the other families are `long`."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(family, marks=[pytest.mark.long] * (family != NEAR)) for family in FAMILIES],
)
def coarse(request: pytest.FixtureRequest, saved: Any) -> Live:
    """An engine in bfloat16, and the model in float32."""
    model, folder = saved(request.param)
    return Live(model, folder, in_process(folder, dtype="bfloat16"))


def test_right_rows_are_taken_and_wrong_ones_refused(coarse: Live) -> None:
    model = coarse.model
    sampling = SamplingParams(max_tokens=160, ignore_eos=True)
    prompts = [{"prompt_token_ids": prompt(70 + number, 50)} for number in range(2)]
    samples: list[tuple[torch.Tensor, RoutedExperts]] = []
    for output in coarse.engine.generate(prompts, sampling, use_tqdm=False):
        (routes,) = from_vllm(output, coarse.folder)
        tokens = torch.tensor([[*output.prompt_token_ids, *output.outputs[0].token_ids]])
        assert isinstance(verdict(lambda tokens=tokens: model(tokens, use_cache=False), model, routes), float)
        samples.append((tokens[:, :-1], routes.take(range(len(routes) - 1))))
    (tokens, routes), (_, other) = samples
    table = check(lambda: model(tokens, use_cache=False), model, {"bfloat16, live": routes}, other)
    print(f"\n{type(model).__name__}, {len(routes)} rows of a live vLLM", *table, sep="\n")
