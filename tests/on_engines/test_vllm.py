"""from_vllm on what vLLM's own classes make: its wire, its output processor, its HTTP answers.

What the scheduler hands over is made here; all that comes after it, to the caller, is vLLM's, unmodified.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Iterator, Sequence
from copy import copy
from inspect import signature
from typing import Any

import numpy as np
import pytest
import vllm
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

import vllm_outputs
from npu_replay.compat.vllm.decode import from_vllm
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.release_rules import release
from vllm_outputs import DEEPSEEK, QWEN, WIDE, Sampled, engine_rows, expected, sampled, siblings

VERSION: str = vllm.__version__
AT = release(VERSION)


def steps(model: RoutedModel, sample: Sampled, start: int = 0) -> Iterator[dict[str, Any]]:
    """What the scheduler has of one request after each step, a token a step. From 0.22 on the first has the
    prompt's rows and each other one row; before, the last step has all."""
    rows = engine_rows(VERSION, model, sample, start)
    for number, token in enumerate(sample.output):
        last = number == len(sample.output) - 1
        if AT < (0, 22):
            part = rows if last else None
        elif number == 0:
            part = rows[: len(sample.prompt) - start]
        else:
            part = rows[len(sample.prompt) - start + number - 1 :][:1]
        reason = FinishReason[sample.finish_reason.upper()] if last and sample.finish_reason else None
        yield {"new_token_ids": [token], "routed_experts": part, "finish_reason": reason}


class Frontend:
    """One request of `n` completions, as AsyncLLM drives it."""

    def __init__(self, prompt: list[int], *, n: int = 1, **sampling: Any) -> None:
        self._processor = OutputProcessor(None, log_stats=False)
        kind = RequestOutputKind.FINAL_ONLY
        self.queue = RequestOutputCollector(kind, "17")
        request = EngineCoreRequest(
            request_id="17",
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=SamplingParams(n=n, max_tokens=1000, output_kind=kind, **sampling),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
            external_req_id="17",
            **({"eos_token_id": None} if "eos_token_id" in signature(EngineCoreRequest).parameters else {}),
        )
        self._ids = ["17"]
        if n == 1:
            self._processor.add_request(request, None, None, 0, self.queue)
            return
        parent = ParentRequest(request)
        self._ids = []
        for index in range(n):
            request_id, child_params = parent.get_child_info(index)
            child = copy(request)
            child.request_id = request_id
            child.sampling_params = child_params
            self._processor.add_request(child, None, parent, index, self.queue)
            self._ids.append(request_id)

    def step(self, step: dict[str, Any], completion: int = 0) -> None:
        """One step of one completion, over the wire between vLLM's processes."""
        sent = EngineCoreOutputs(outputs=[EngineCoreOutput(request_id=self._ids[completion], **step)])
        received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
        self._processor.process_outputs(received.outputs)

    def abort(self) -> None:
        self._processor.abort_requests(["17"], internal=False)

    def output(self) -> RequestOutput:
        """What the caller of `generate` gets."""
        return self.queue.get_nowait()


def generate(model: RoutedModel, completions: Sequence[Sampled], start: int = 0) -> RequestOutput:
    """The output of one request, finished."""
    sampling = {"routed_experts_prompt_start": start} if start else {}
    frontend = Frontend(completions[0].prompt, n=len(completions), **sampling)
    for index, sample in enumerate(completions):
        for step in steps(model, sample, start):
            frontend.step(step, index)
    return frontend.output()


def completion_answer(output: RequestOutput) -> str:
    """The JSON of /v1/completions with return_token_ids, by the server's own method."""
    from vllm.entrypoints.openai.completion import serving

    server = object.__new__(serving.OpenAIServingCompletion)  # its __init__ wants an engine
    server.enable_prompt_tokens_details = False
    server.enable_per_request_metrics = False
    server.system_fingerprint = None
    request = serving.CompletionRequest(
        prompt=output.prompt_token_ids, max_tokens=1000, n=len(output.outputs), return_token_ids=True
    )
    return server.request_output_to_completion_response(
        [output], request, "cmpl-17", 0, "model", None, serving.RequestResponseMetadata(request_id="17")
    ).model_dump_json()


def chat_answer(output: RequestOutput) -> str:
    """The JSON of /v1/chat/completions, by its own models."""
    from vllm.entrypoints.openai.chat_completion import protocol

    # The same lines encode the rows in both servers.
    encoded = json.loads(completion_answer(output))
    return protocol.ChatCompletionResponse(
        model="model",
        choices=[
            protocol.ChatCompletionResponseChoice(
                index=completion.index,
                message=protocol.ChatMessage(role="assistant", content=completion.text),
                finish_reason=completion.finish_reason,
                stop_reason=completion.stop_reason,
                token_ids=list(completion.token_ids),
                routed_experts=there["routed_experts"],
            )
            for completion, there in zip(output.outputs, encoded["choices"], strict=True)
        ],
        usage=protocol.UsageInfo(),
        prompt_token_ids=output.prompt_token_ids,
        **{name: encoded[name] for name in ("prompt_routed_experts",) if name in encoded},
    ).model_dump_json()


def token_answer(output: RequestOutput) -> str:
    """The JSON of /inference/v1/generate, by its own models."""
    place = "serve.disagg" if AT < (0, 25) else "scale_out.token_in_token_out"
    protocol = importlib.import_module(f"vllm.entrypoints.{place}.protocol")
    modes = AT >= (0, 32)  # one class for each kind of output
    choice = protocol.GenerateTokensChoice if modes else protocol.GenerateResponseChoice
    answer = protocol.GenerateTokensResponse if modes else protocol.GenerateResponse
    encoded = json.loads(completion_answer(output))
    choices = [
        choice(
            index=completion.index,
            finish_reason=completion.finish_reason,
            token_ids=list(completion.token_ids),
            routed_experts=there["routed_experts"],
        )
        for completion, there in zip(output.outputs, encoded["choices"], strict=True)
    ]
    return answer(choices=choices, request_id="17").model_dump_json()


MODELS = pytest.mark.parametrize("model", [QWEN, DEEPSEEK, WIDE], ids=["qwen", "deepseek", "wide"])


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


@MODELS
@pytest.mark.parametrize(
    ("endpoint", "since", "count"),
    [
        (completion_answer, (0, 21), 1),
        (completion_answer, (0, 21), 3),
        (chat_answer, (0, 21), 2),
        (token_answer, (0, 22), 2),
    ],
)
def test_an_answer_over_http(model: Any, endpoint: Any, since: tuple[int, ...], count: int) -> None:
    """/v1/completions, /v1/chat/completions and /inference/v1/generate, whose answers have no prompt."""
    if since > AT:
        pytest.skip(f"its rows are newer than vLLM {VERSION}")
    completions = siblings(model, count)
    text = endpoint(generate(model, completions))
    options = {"prompt_token_ids": completions[0].prompt} if endpoint is token_answer else {}
    wanted = [expected(model, sample) for sample in completions]
    for answer in (text, text.encode(), json.loads(text)):
        assert from_vllm(answer, model, version=VERSION, **options) == wanted


def test_what_the_other_tests_take_for_its_outputs_has_its_attributes() -> None:
    """tests/vllm_outputs.py stands in for these classes where vLLM isn't there."""
    real = {field.name for field in dataclasses.fields(CompletionOutput)}
    assert {field.name for field in dataclasses.fields(vllm_outputs.CompletionOutput)} <= real
    output = generate(QWEN, [sampled(QWEN)])
    stand_in = vllm_outputs.request_output(VERSION, QWEN, sampled(QWEN))
    assert set(vars(stand_in)) <= set(vars(output))
    for mine, theirs in zip(stand_in.outputs, output.outputs, strict=True):
        assert np.array_equal(mine.routed_experts, theirs.routed_experts)
        assert mine.routed_experts.dtype == theirs.routed_experts.dtype
