"""from_vllm on what vLLM's own classes make, from the scheduler's step to the caller."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm.outputs
from vllm.sampling_params import RequestOutputKind

import vllm_outputs
from npu_replay.compat.vllm.decode import from_vllm
from npu_replay.errors import InvalidRoutes
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
    one = sampled(model)
    output = generate(model, [one])
    assert from_vllm(output, model, version=VERSION) == [expected(model, one)]


@pytest.mark.skipif(AT[:2] != (0, 21), reason="0.21 alone counts MoE layers")
@pytest.mark.parametrize(
    ("says", "columns"),
    [
        ({"mlp_only_layers": [0, 1]}, 5),
        ({"first_k_dense_replace": 2}, 7),
        ({"layers_block_type": ["moe"] * 5}, 5),
    ],
    ids=["qwen", "deepseek", "nemotron"],
)
def test_columns_as_0_21_counts_them(says: dict[str, Any], columns: int) -> None:
    """It overlooks first_k_dense_replace, but numbers only the layers with experts."""
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import _count_moe_layers

    counted = _count_moe_layers(SimpleNamespace(num_hidden_layers=7, **says))
    assert counted == columns
    one = sampled(DEEPSEEK)
    rows = np.zeros((len(one.tokens) - 1, counted, DEEPSEEK.topk), np.int16)
    rows[:, : len(DEEPSEEK.layers)] = one.rows[:-1]
    frontend = Frontend(one.prompt)
    for step in steps(DEEPSEEK, one):
        frontend.step(dataclasses.replace(step, rows=None if step.rows is None else rows))
    assert from_vllm(frontend.output(), DEEPSEEK, version=VERSION) == [expected(DEEPSEEK, one)]


@pytest.mark.skipif(AT < (0, 22), reason="the request's start is new in 0.22")
@pytest.mark.parametrize("start", [1, 37, 69])
def test_rows_from_a_start_on(start: int) -> None:
    one = sampled(DEEPSEEK)
    output = generate(DEEPSEEK, [one], start=start)
    assert from_vllm(output, DEEPSEEK, start=start, version=VERSION) == [expected(DEEPSEEK, one, start=start)]


def test_a_request_that_was_aborted() -> None:
    """From 0.22 on it has the rows so far; before, none."""
    one = sampled(QWEN)
    frontend = Frontend(one.prompt)
    for step in list(steps(QWEN, one))[:10]:
        frontend.step(step)
    frontend.abort()
    output = frontend.output()
    assert output.outputs[0].finish_reason == "abort"
    cut = dataclasses.replace(one, output=one.output[:10], rows=one.rows[: len(one.prompt) + 10])
    rows = 0 if AT < (0, 22) else None
    assert from_vllm(output, QWEN, version=VERSION) == [expected(QWEN, cut, rows=rows)]


def test_a_request_that_ended_by_a_stop_string() -> None:
    """vLLM sees the string after the scheduler is done with the step: before 0.22 the rows are lost."""
    one = sampled(QWEN, output=12)
    one = dataclasses.replace(one, output=[token % 90 for token in one.output[:-1]] + [99])
    frontend = Frontend(one.prompt, tokenizer=_tokenizer(), stop=["w99"])
    for step in steps(QWEN, one):
        told = dataclasses.replace(step, finish_reason=None)
        frontend.step(dataclasses.replace(told, rows=None) if AT < (0, 22) else told)
    output = frontend.output()
    assert output.outputs[0].stop_reason == "w99"
    assert list(output.outputs[0].token_ids) == one.output
    if AT < (0, 22):
        with pytest.raises(InvalidRoutes, match="stop string"):
            from_vllm(output, QWEN, version=VERSION)
    else:
        assert from_vllm(output, QWEN, version=VERSION) == [expected(QWEN, one)]


def test_outputs_that_were_merged_while_nobody_read_them() -> None:
    """Before 0.31 merging forgets the rows, which come with the last output."""
    one = sampled(QWEN, output=5)
    frontend = Frontend(one.prompt, kind=RequestOutputKind.DELTA)
    for step in steps(QWEN, one):
        frontend.step(step)
    output = frontend.output()
    assert list(output.outputs[0].token_ids) == one.output
    if AT < (0, 31):
        assert output.outputs[0].routed_experts is None
        with pytest.raises(InvalidRoutes):
            from_vllm(output, QWEN, version=VERSION)
    else:
        assert from_vllm(output, QWEN, version=VERSION) == [expected(QWEN, one)]


@pytest.mark.skipif(AT < (0, 32), reason="weight versions are new in 0.32")
def test_the_weights_that_the_engine_names() -> None:
    one = sampled(QWEN, output=5)
    frontend = Frontend(one.prompt)
    for step in steps(QWEN, one):
        frontend.step(step, weight_version="step-7")
    (routes,) = from_vllm(frontend.output(), QWEN, version=VERSION)
    assert routes.weight_version == "step-7"


@over_http
@MODELS
@pytest.mark.parametrize("count", [1, 3])
def test_the_completion_endpoint(model: Any, count: int) -> None:
    completions = siblings(model, count)
    text = completion_answer(generate(model, completions), count)
    wanted = [expected(model, one) for one in completions]
    assert from_vllm(text, model, version=VERSION) == wanted
    assert from_vllm(json.loads(text), model, version=VERSION) == wanted


@over_http
@MODELS
def test_the_chat_endpoint(model: Any) -> None:
    completions = siblings(model, 2)
    text = chat_answer(generate(model, completions))
    assert from_vllm(text.encode(), model, version=VERSION) == [expected(model, one) for one in completions]


@pytest.mark.skipif(AT < (0, 22), reason="its rows are new in 0.22")
@MODELS
def test_the_token_endpoint(model: Any) -> None:
    completions = siblings(model, 2)
    text = token_answer(generate(model, completions))
    wanted = [expected(model, one) for one in completions]
    prompt = completions[0].prompt
    assert from_vllm(text, model, prompt_token_ids=prompt, version=VERSION) == wanted


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


def _tokenizer() -> Any:
    """A hundred words, w0 to w99."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(100)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0")
