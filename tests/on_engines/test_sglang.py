"""from_sglang on what SGLang's own code makes of a request's rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from npu_replay.compat.sglang.decode import from_sglang
from npu_replay.compat.sglang.engine_plan import engine_arguments
from npu_replay.errors import ReplayError
from npu_replay.rollout.model_config import RoutedModel
from on_engines.sglang_frontend import (
    AT,
    VERSION,
    captured_in_halves,
    meta_info,
    openai_protocol,
    openai_rows,
    own_reader,
)
from vllm_outputs import DEEPSEEK, QWEN, WIDE, Sampled, expected, sampled

MODELS = pytest.mark.parametrize("model", [QWEN, DEEPSEEK, WIDE], ids=["qwen", "deepseek", "wide"])


def collected(model: RoutedModel, one: Sampled, start: int = 0) -> torch.Tensor:
    """The scheduler's rows: all decoder layers, none for the last token."""
    rows = np.zeros((len(one.tokens), model.num_layers, model.topk), np.int32)
    rows[:, list(model.layers)] = one.rows
    return torch.from_numpy(rows[start:-1])


def said(one: Sampled, finish: str = "length") -> dict[str, Any]:
    return {
        "id": "3f9d",
        "finish_reason": {"type": finish, "length": len(one.output)},
        "prompt_tokens": len(one.prompt),
        "completion_tokens": len(one.output),
        "cached_tokens": 0,
    }


def read(meta: Any, model: RoutedModel, one: Sampled, **asked: Any) -> Any:
    return from_sglang(
        meta, model, prompt_token_ids=one.prompt, output_ids=one.output, version=VERSION, **asked
    )


@pytest.mark.skipif(AT < (0, 5, 8), reason="an older release is refused whatever it is started with")
def test_two_half_batches_at_once_lose_rows() -> None:
    """SGLang's own buffer, in a step of two halves of four tokens, one layer; a plan with them is refused."""
    with pytest.raises(ReplayError, match="two half batches"):
        engine_arguments(VERSION, planned={"enable_two_batch_overlap": True, "moe_a2a_backend": "none"})
    halves = torch.arange(16, dtype=torch.int32).reshape(2, 4, 2)
    captured = captured_in_halves(list(halves))
    assert not (captured == halves.reshape(8, 1, 2)).all(-1).any()


@MODELS
@pytest.mark.parametrize("text", [True, False], ids=["text", "skip-tokenizer-init"])
def test_a_meta_info(model: RoutedModel, text: bool) -> None:
    one = sampled(model)
    meta = meta_info(collected(model, one), said(one), text=text)
    assert isinstance(meta["routed_experts"], str if text or AT >= (0, 5, 10) else torch.Tensor)
    assert read(meta, model, one) == expected(model, one)


@MODELS
def test_its_own_reader_reads_the_same(model: RoutedModel) -> None:
    one = sampled(model)
    meta = meta_info(collected(model, one), said(one))
    flat = own_reader()({"meta_info": meta})
    assert flat.dtype == np.int32
    rows = flat.reshape(-1, model.num_layers, model.topk)[:, list(model.layers)]
    assert np.array_equal(rows, read(meta, model, one).ids[:-1])


@pytest.mark.skipif(AT < (0, 5, 12), reason="a request's start counts from 0.5.12 on")
@pytest.mark.parametrize("start", [1, 37, 70])
def test_rows_from_a_start_on(start: int) -> None:
    one = sampled(DEEPSEEK)
    meta = meta_info(collected(DEEPSEEK, one, start), said(one))
    assert read(meta, DEEPSEEK, one, start_len=start) == expected(DEEPSEEK, one, start=start)


def test_a_request_that_was_aborted_before_it_ran() -> None:
    one = sampled(QWEN, output=0)
    meta = meta_info(None, said(one, "abort"))
    assert meta.get("routed_experts") in (None, [])  # 0.5.7 says []
    assert read(meta, QWEN, one) == expected(QWEN, one, rows=0)


@pytest.mark.skipif(AT < (0, 5, 9), reason="sglext is new in 0.5.9")
@MODELS
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_the_openai_endpoints(model: RoutedModel, chat: bool) -> None:
    one = sampled(model)
    protocol = openai_protocol()
    rows = openai_rows(meta_info(collected(model, one), said(one)))
    usage = protocol.UsageInfo(
        prompt_tokens=len(one.prompt), completion_tokens=len(one.output), total_tokens=len(one.tokens)
    )
    shared = {"id": "3f9d", "model": "m", "usage": usage, "sglext": protocol.SglExt(routed_experts=rows)}
    if chat:
        message = protocol.ChatMessage(role="assistant", content="")
        choice = protocol.ChatCompletionResponseChoice(index=0, message=message, finish_reason="length")
        answer = protocol.ChatCompletionResponse(choices=[choice], **shared)
    else:
        choice = protocol.CompletionResponseChoice(index=0, text="", finish_reason="length")
        answer = protocol.CompletionResponse(choices=[choice], **shared)
    assert read(answer.model_dump_json(), model, one) == expected(model, one)
    assert read(answer.model_dump(), model, one) == expected(model, one)
