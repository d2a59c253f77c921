"""from_sglang on what SGLang's own code makes of a request's rows, between its scheduler and the caller.

Importing `sglang` wants torchvision and triton. So its packages are entered without their `__init__`, and of
the managers, whose imports are the whole engine, single functions are taken as they stand: their unchanged
text, with the real modules that they name.
"""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from importlib.metadata import version
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pybase64
import pytest
import torch

from npu_replay.compat.sglang.decode import from_sglang
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.release_rules import release
from vllm_outputs import DEEPSEEK, QWEN, WIDE, Sampled, expected, sampled

VERSION = version("sglang")
AT = release(VERSION)

SOURCE = Path(find_spec("sglang").origin).parent

NAMES = {"np": np, "torch": torch, "pybase64": pybase64}


def meta_info(
    rows: torch.Tensor | None, sample: Sampled, *, finish: str = "length", text: bool = True
) -> dict[str, Any]:
    """What the caller gets of one request.

    Args:
        rows: [rows, layers, topk] int32, from the scheduler; None where it collected none.
        text: False is skip_tokenizer_init, with which the detokenizer is left out.
    """
    name = "output_routed_experts" if AT < (0, 5, 8) else "routed_experts"
    batch = SimpleNamespace(**{name: [rows]})
    if text:
        setattr(batch, name, _written(batch))
    info = {
        "id": "3f9d",
        "finish_reason": {"type": finish, "length": len(sample.output)},
        "prompt_tokens": len(sample.prompt),
        "completion_tokens": len(sample.output),
        "cached_tokens": 0,
    }
    exec(_filling(), NAMES | {"recv_obj": batch, "i": 0, "meta_info": info})
    return info


def openai_rows(meta: dict[str, Any]) -> str | None:
    """What its OpenAI servers put into sglext."""
    process = _imported("sglang.srt.entrypoints.openai.utils").process_routed_experts_from_ret
    return process({"meta_info": meta}, SimpleNamespace(return_routed_experts=True))


def _written(batch: SimpleNamespace) -> Any:
    """By the detokenizer manager; 0.5.10 leaves it to the tokenizer manager."""
    file = "srt/managers/detokenizer_manager.py"
    if AT < (0, 5, 10):
        return _taken(file, "_extract_routed_experts")(None, batch)
    if AT < (0, 5, 11):
        return batch.routed_experts
    return _taken(file, "_b64_encode_per_request")(batch.routed_experts)


@functools.cache
def _filling() -> Any:
    """The tokenizer manager's statement that puts the rows into meta_info."""
    for node in ast.walk(_parsed("srt/managers/tokenizer_manager.py")):
        if (
            isinstance(node, ast.If)
            and "routed_experts" in ast.unparse(node.test)
            and "getattr" in ast.unparse(node.test)
        ):
            return compile(ast.Module([node], []), "tokenizer_manager.py", "exec")
    raise LookupError("tokenizer_manager.py no longer fills meta_info in an if statement")


@functools.cache
def _taken(file: str, name: str) -> Any:
    for node in ast.walk(_parsed(file)):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            node.decorator_list = []
            there = dict(NAMES)
            # Its annotations name the engine's classes: they stay text, as in this file, whose future import
            # `compile` takes over.
            exec(compile(ast.Module([node], []), file, "exec"), there)
            return there[name]
    raise LookupError(f"{file} has no function {name}")


def _parsed(file: str) -> ast.Module:
    return ast.parse((SOURCE / file).read_text(encoding="utf-8"))


def _imported(name: str) -> ModuleType:
    parents = name.split(".")[:-1]
    for depth in range(1, len(parents) + 1):
        package = ".".join(parents[:depth])
        if package not in sys.modules:
            spec = find_spec(package)
            sys.modules[package] = module_from_spec(spec)
    return importlib.import_module(name)


MODELS = pytest.mark.parametrize("model", [QWEN, DEEPSEEK, WIDE], ids=["qwen", "deepseek", "wide"])


def collected(model: RoutedModel, sample: Sampled, start: int = 0) -> torch.Tensor:
    """The scheduler's rows: all decoder layers, none for the last token."""
    rows = np.zeros((len(sample.tokens), model.num_layers, model.topk), np.int32)
    rows[:, list(model.layers)] = sample.rows
    return torch.from_numpy(rows[start:-1])


def read(meta: Any, model: RoutedModel, sample: Sampled, **options: Any) -> Any:
    return from_sglang(
        meta, model, prompt_token_ids=sample.prompt, output_ids=sample.output, version=VERSION, **options
    )


@MODELS
@pytest.mark.parametrize("text", [True, False], ids=["text", "skip-tokenizer-init"])
def test_a_meta_info(model: RoutedModel, text: bool) -> None:
    sample = sampled(model)
    meta = meta_info(collected(model, sample), sample, text=text)
    assert isinstance(meta["routed_experts"], str if text or AT >= (0, 5, 10) else torch.Tensor)
    assert read(meta, model, sample) == expected(model, sample)


@pytest.mark.skipif(AT < (0, 5, 12), reason="a request's start counts from 0.5.12 on")
@pytest.mark.parametrize("start", [1, 37, 70])
def test_rows_from_a_start_on(start: int) -> None:
    sample = sampled(DEEPSEEK)
    meta = meta_info(collected(DEEPSEEK, sample, start), sample)
    assert read(meta, DEEPSEEK, sample, start_len=start) == expected(DEEPSEEK, sample, start=start)


def test_a_request_that_was_aborted_before_it_ran() -> None:
    sample = sampled(QWEN, output=0)
    meta = meta_info(None, sample, finish="abort")
    assert meta.get("routed_experts") in (None, [])  # 0.5.7 says []
    assert read(meta, QWEN, sample) == expected(QWEN, sample, rows=0)


@pytest.mark.skipif(AT < (0, 5, 9), reason="sglext is new in 0.5.9")
@MODELS
@pytest.mark.parametrize("chat", [False, True], ids=["completion", "chat"])
def test_the_openai_endpoints(model: RoutedModel, chat: bool) -> None:
    sample = sampled(model)
    protocol = _imported("sglang.srt.entrypoints.openai.protocol")
    rows = openai_rows(meta_info(collected(model, sample), sample))
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
