"""from_sglang on what SGLang's own code makes of a request's rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from npu_replay.compat.sglang.decode import from_sglang
from npu_replay.rollout.model_config import RoutedModel
from on_engines.sglang_frontend import (
    AT,
    VERSION,
    meta_info,
    openai_protocol,
    openai_rows,
)
from vllm_outputs import DEEPSEEK, QWEN, WIDE, Sampled, expected, sampled

MODELS = pytest.mark.parametrize("model", [QWEN, DEEPSEEK, WIDE], ids=["qwen", "deepseek", "wide"])


def collected(model: RoutedModel, sample: Sampled, start: int = 0) -> torch.Tensor:
    """The scheduler's rows: all decoder layers, none for the last token."""
    rows = np.zeros((len(sample.tokens), model.num_layers, model.topk), np.int32)
    rows[:, list(model.layers)] = sample.rows
    return torch.from_numpy(rows[start:-1])


def counts(sample: Sampled, finish: str = "length") -> dict[str, Any]:
    return {
        "id": "3f9d",
        "finish_reason": {"type": finish, "length": len(sample.output)},
        "prompt_tokens": len(sample.prompt),
        "completion_tokens": len(sample.output),
        "cached_tokens": 0,
    }


def read(meta: Any, model: RoutedModel, sample: Sampled, **asked: Any) -> Any:
    return from_sglang(
        meta, model, prompt_token_ids=sample.prompt, output_ids=sample.output, version=VERSION, **asked
    )


@MODELS
@pytest.mark.parametrize("text", [True, False], ids=["text", "skip-tokenizer-init"])
def test_a_meta_info(model: RoutedModel, text: bool) -> None:
    sample = sampled(model)
    meta = meta_info(collected(model, sample), counts(sample), text=text)
    assert isinstance(meta["routed_experts"], str if text or AT >= (0, 5, 10) else torch.Tensor)
    assert read(meta, model, sample) == expected(model, sample)


@pytest.mark.skipif(AT < (0, 5, 12), reason="a request's start counts from 0.5.12 on")
@pytest.mark.parametrize("start", [1, 37, 70])
def test_rows_from_a_start_on(start: int) -> None:
    sample = sampled(DEEPSEEK)
    meta = meta_info(collected(DEEPSEEK, sample, start), counts(sample))
    assert read(meta, DEEPSEEK, sample, start_len=start) == expected(DEEPSEEK, sample, start=start)


def test_a_request_that_was_aborted_before_it_ran() -> None:
    sample = sampled(QWEN, output=0)
    meta = meta_info(None, counts(sample, "abort"))
    assert meta.get("routed_experts") in (None, [])  # 0.5.7 says []
    assert read(meta, QWEN, sample) == expected(QWEN, sample, rows=0)


@pytest.mark.skipif(AT < (0, 5, 9), reason="sglext is new in 0.5.9")
@MODELS
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_the_openai_endpoints(model: RoutedModel, chat: bool) -> None:
    sample = sampled(model)
    protocol = openai_protocol()
    rows = openai_rows(meta_info(collected(model, sample), counts(sample)))
    usage = protocol.UsageInfo(
        prompt_tokens=len(sample.prompt),
        completion_tokens=len(sample.output),
        total_tokens=len(sample.tokens),
    )
    shared = {"id": "3f9d", "model": "m", "usage": usage, "sglext": protocol.SglExt(routed_experts=rows)}
    if chat:
        message = protocol.ChatMessage(role="assistant", content="")
        choice = protocol.ChatCompletionResponseChoice(index=0, message=message, finish_reason="length")
        answer = protocol.ChatCompletionResponse(choices=[choice], **shared)
    else:
        choice = protocol.CompletionResponseChoice(index=0, text="", finish_reason="length")
        answer = protocol.CompletionResponse(choices=[choice], **shared)
    assert read(answer.model_dump_json(), model, sample) == expected(model, sample)
    assert read(answer.model_dump(), model, sample) == expected(model, sample)
