"""Routes in the envelope of gateways, {data, shape, dtype, start}, for the decoder of every engine."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from npu_replay import from_sglang, from_vllm
from npu_replay.errors import InvalidRoutes
from npu_replay.inspection.inspection import whose
from npu_replay.routes.checks import Array
from npu_replay.routes.routed_experts import RoutedExperts
from rollout.test_engine_contract import ENGINES, MODEL, ONE, ROWS, Engine
from vllm_outputs import expected

RUN = len(ROWS)
VLLM = ENGINES[0]
EACH = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)


def decode(engine: Engine, answer: Any, start: int = 0) -> RoutedExperts:
    return engine.decode(answer, prompt=ONE.prompt, output=ONE.output, start=start)


def envelope(start: int = 0, dtype: str = "uint16", **changes: Any) -> dict[str, Any]:
    part = ROWS[start:].astype(dtype)
    text = base64.b64encode(part.tobytes()).decode()
    return {"data": text, "shape": list(part.shape), "dtype": dtype, "start": start} | changes


def chat(choice: dict[str, Any] | None = None, **beside: Any) -> dict[str, Any]:
    default = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "stop"}
    return {"id": "chatcmpl-1", "object": "chat.completion", "choices": [default | (choice or {})], **beside}


def assert_the_rows(routes: RoutedExperts, start: int = 0) -> None:
    assert routes == expected(MODEL, ONE, start=start)


PLACES: dict[str, Callable[[Any], Any]] = {
    "nvext": lambda routes: chat(nvext={"routed_experts": routes}),
    "engine_data": lambda routes: chat(nvext={"engine_data": {"routed_experts": routes}}),
    "the choice": lambda routes: chat({"routed_experts": routes}),
    "by itself": lambda routes: routes,
    "as JSON": lambda routes: json.dumps(chat(nvext={"routed_experts": routes})),
}


@EACH
@pytest.mark.parametrize("place", PLACES)
def test_an_envelope_is_read_wherever_it_lies(engine: Engine, place: str) -> None:
    for start in (0, 20):
        assert_the_rows(decode(engine, PLACES[place](envelope(start)), start), start)


@EACH
@pytest.mark.parametrize("dtype", ["uint16", "int16", "int32", "int64"])
def test_an_envelope_may_be_of_any_width_in_text_bytes_or_numbers(engine: Engine, dtype: str) -> None:
    text = envelope(dtype=dtype)["data"]
    for data in [
        text,
        base64.b64decode(text),
        memoryview(base64.b64decode(text)),
        ROWS.astype(dtype),
    ]:
        assert_the_rows(decode(engine, envelope(dtype=dtype, data=data)))
    unsaid = envelope(20, dtype)
    del unsaid["start"]
    assert_the_rows(decode(engine, unsaid, 20), 20)


def test_dynamo_says_which_tokens_were_sampled() -> None:
    beside = {"engine_data": {"routed_experts": envelope(), "completion_token_ids": ONE.output}}
    (routes,) = from_vllm(chat(nvext=beside), MODEL, prompt_token_ids=ONE.prompt)
    assert_the_rows(routes)
    assert_the_rows(from_sglang(chat(nvext=beside), MODEL, prompt_token_ids=ONE.prompt))


def nemo(rows: Array = ROWS, dtype: str = "int16") -> str:
    """NeMo-RL's codec: a row for each token, the last of which is filled."""
    filled = np.broadcast_to(np.arange(rows.shape[2]), (1, *rows.shape[1:]))
    every = np.concatenate([rows, filled]).astype(dtype)
    return f"nrlre1:{dtype}:{'x'.join(map(str, every.shape))}:{base64.b64encode(every.tobytes()).decode()}"


def rllm(dtype: str = "uint8", **changes: Any) -> list[str]:
    """The header says layers, top-k and dtype, and the text how many rows there are."""
    head = json.dumps({"shape": list(ROWS.shape[1:]), "dtype": dtype} | changes)
    return [head, base64.b64encode(ROWS.astype(dtype).tobytes()).decode()]


KNOWN = {"prompt_token_ids": ONE.prompt, "generation_token_ids": ONE.output}
MEGATRON = {"index": 0, "finish_reason": "length", "moe_topk_indices": ROWS[:, MODEL.layers].tolist()}
FORMS: dict[str, Any] = {
    "NeMo-RL": chat({"message": {"content": "", "routed_experts": nemo(), **KNOWN}}),
    "NeMo-RL, int32": chat({"message": {"content": "", "routed_experts": nemo(dtype="int32"), **KNOWN}}),
    "rLLM": chat({"routing_matrices": rllm(), "token_ids": ONE.output, "prompt_token_ids": ONE.prompt}),
    "rLLM, int16": chat(
        {"routing_matrices": rllm("int16"), "token_ids": ONE.output, "prompt_token_ids": ONE.prompt}
    ),
    "Megatron's completions": {"choices": [MEGATRON | KNOWN]},
    "Megatron's chats": {"choices": [MEGATRON | {"message": {"role": "assistant", **KNOWN}}]},
    "Megatron's request": SimpleNamespace(
        routing_indices=ROWS[:, MODEL.layers].astype(np.int16),
        prompt_tokens=torch.tensor(ONE.prompt),
        generated_tokens=ONE.output,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_frameworks_send_in_the_place_of_vllm_is_read(form: str) -> None:
    (routes,) = from_vllm(FORMS[form], MODEL)
    assert_the_rows(routes)
    if not isinstance(FORMS[form], SimpleNamespace):
        (routes,) = from_vllm(json.dumps(FORMS[form]), MODEL)
        assert_the_rows(routes)
        assert whose(FORMS[form]) == "vllm", "`npu-replay inspect` tells the decoder"


def test_lmdeploys_lists_are_read() -> None:
    info = {"finish_reason": {"type": "length"}, "completion_tokens": len(ONE.output)}
    answer = {"output_ids": ONE.output, "meta_info": info | {"routed_experts": ROWS.tolist()}}
    for sent in (answer, json.dumps(answer)):
        assert_the_rows(from_sglang(sent, MODEL, prompt_token_ids=ONE.prompt))


WRONG = {
    "another start": (envelope(20), r"begin at another token.*start=0.*start 20"),
    "no shape": (envelope(shape=None), r"unknown form.*shape None"),
    "of bool": (envelope(shape=[True, 2, 3]), r"unknown form"),
    "huge": (envelope(shape=[1 << 40, 4, 2]), r"cut short or lengthened"),
    "cut": (envelope(data=envelope()["data"][:-8]), r"cut short or lengthened"),
    "an odd byte": (
        envelope(data=base64.b64encode(ROWS.astype("u2").tobytes() + b"\0").decode()),
        r"cut short",
    ),
    "as many characters as bytes": (envelope(data="A" * (2 * ROWS.size)), r"cut short"),
    "not base64": (envelope(data="§" * 8), r"base64"),
    "not integers": (envelope(data=[0.5] * ROWS.size), r"unknown form"),
    "NeMo-RL's, of another version": ("nrlre1:int16:AAAA", r"unknown form.*nrlre1:int16:AAAA"),
    "NeMo-RL's, cut": (nemo()[:-8], r"cut short"),
    "NeMo-RL's, of floats": (nemo().replace("int16", "float16"), r"unknown form.*float16"),
    "NeMo-RL's, huge": ("nrlre1:int8:999999999x4x2:AAAA", r"cut short or lengthened"),
    "NeMo-RL's, of another sequence": (nemo(ROWS[:-2]), f"{RUN} rows.*got {RUN - 1}"),
    "rLLM's, of floats": (rllm(dtype="uint8", shape=[7, 0.5]), r"unknown form"),
    "rLLM's, of no layers": (rllm(shape=[0, 8]), r"unknown form"),
    "rLLM's, of a list": (rllm(dtype="uint8", shape="78"), r"unknown form"),
    "unnamed keys": ({"bytes": "AA=="}, r"expert ids"),
}


@EACH
@pytest.mark.parametrize("fault", WRONG)
def test_what_cannot_be_read_is_said_to_be_there(engine: Engine, fault: str) -> None:
    routes, words = WRONG[fault]
    with pytest.raises(InvalidRoutes, match=words) as error:
        decode(engine, chat(nvext={"routed_experts": routes}))
    assert "nvext.routed_experts" in str(error.value)
    assert "enable_return_routed_experts" not in str(error.value)


def test_routes_beside_several_choices_are_whose() -> None:
    answer = chat(nvext={"routed_experts": envelope()})
    answer["choices"] = [answer["choices"][0], answer["choices"][0] | {"index": 1}]
    with pytest.raises(
        InvalidRoutes, match=r"nvext.routed_experts has the routes of one choice.*n=1.*2 choices"
    ):
        from_vllm(answer, MODEL, prompt_token_ids=ONE.prompt, output_token_ids=[ONE.output, ONE.output])
