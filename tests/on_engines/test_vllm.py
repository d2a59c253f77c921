"""from_vllm on what vLLM's own classes make, from the scheduler's step to the caller."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest
import vllm.outputs

import vllm_outputs
from npu_replay.compat.vllm.decode import from_vllm
from on_engines.vllm_frontend import (
    AT,
    VERSION,
    Frontend,
    chat_answer,
    completion_answer,
    generate,
    steps,
    token_answer,
)
from vllm_outputs import DEEPSEEK, QWEN, WIDE, expected, sampled, siblings

MODELS = pytest.mark.parametrize("model", [QWEN, DEEPSEEK, WIDE], ids=["qwen", "deepseek", "wide"])
over_http = pytest.mark.skipif(AT < (0, 21), reason=f"vLLM {VERSION} has no rows over HTTP")


@MODELS
def test_a_request_output(model: Any) -> None:
    sample = sampled(model)
    assert from_vllm(generate(model, [sample]), model, version=VERSION) == [expected(model, sample)]


@pytest.mark.skipif(AT < (0, 22), reason="the request's start is new in 0.22")
@pytest.mark.parametrize("start", [1, 37, 69])
def test_rows_from_a_start_on(start: int) -> None:
    sample = sampled(DEEPSEEK)
    output = generate(DEEPSEEK, [sample], start=start)
    assert from_vllm(output, DEEPSEEK, start=start, version=VERSION) == [
        expected(DEEPSEEK, sample, start=start)
    ]


def test_a_request_that_was_aborted() -> None:
    """From 0.22 on it has the rows so far; before, none."""
    sample = sampled(QWEN)
    frontend = Frontend(sample.prompt)
    for step in list(steps(QWEN, sample))[:10]:
        frontend.step(step)
    frontend.abort()
    output = frontend.output()
    assert output.outputs[0].finish_reason == "abort"
    cut = dataclasses.replace(sample, output=sample.output[:10], rows=sample.rows[: len(sample.prompt) + 10])
    assert from_vllm(output, QWEN, version=VERSION) == [expected(QWEN, cut, rows=0 if AT < (0, 22) else None)]


@over_http
@MODELS
@pytest.mark.parametrize("count", [1, 3])
def test_the_completion_endpoint(model: Any, count: int) -> None:
    completions = siblings(model, count)
    text = completion_answer(generate(model, completions), count)
    wanted = [expected(model, sample) for sample in completions]
    assert from_vllm(text, model, version=VERSION) == wanted
    assert from_vllm(json.loads(text), model, version=VERSION) == wanted


@over_http
@MODELS
def test_the_chat_endpoint(model: Any) -> None:
    completions = siblings(model, 2)
    text = chat_answer(generate(model, completions))
    assert from_vllm(text.encode(), model, version=VERSION) == [
        expected(model, sample) for sample in completions
    ]


@pytest.mark.skipif(AT < (0, 22), reason="its rows are new in 0.22")
@MODELS
def test_the_token_endpoint(model: Any) -> None:
    completions = siblings(model, 2)
    text = token_answer(generate(model, completions))
    wanted = [expected(model, sample) for sample in completions]
    assert from_vllm(text, model, prompt_token_ids=completions[0].prompt, version=VERSION) == wanted


def test_what_the_other_tests_take_for_its_outputs_has_its_attributes() -> None:
    """tests/vllm_outputs.py stands in for these classes where vLLM isn't there."""
    real = {field.name for field in dataclasses.fields(vllm.outputs.CompletionOutput)}
    assert {field.name for field in dataclasses.fields(vllm_outputs.CompletionOutput)} <= real
    output = generate(QWEN, [sampled(QWEN)])
    stand_in = vllm_outputs.request_output(VERSION, QWEN, sampled(QWEN))
    assert set(vars(stand_in)) <= set(vars(output))
    for mine, theirs in zip(stand_in.outputs, output.outputs, strict=True):
        assert np.array_equal(mine.routed_experts, theirs.routed_experts)
        assert mine.routed_experts.dtype == theirs.routed_experts.dtype
