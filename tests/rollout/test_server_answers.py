"""compat.server_answers: what a server refuses with is quoted, whichever engine's decoder is given it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from npu_replay.compat.sglang.decode import from_sglang
from npu_replay.compat.vllm.decode import from_vllm
from npu_replay.errors import InvalidRoutes
from vllm_outputs import QWEN

REFUSALS: dict[str, tuple[Any, str]] = {
    "openai": (
        {"error": {"message": "The model `m` does not exist.", "type": "NotFoundError", "code": 404}},
        "«The model `m` does not exist.»",
    ),
    "openai-flat": ({"object": "error", "message": "too long", "type": "BadRequestError"}, "«too long»"),
    "an-error-of-text": ({"error": "out of memory"}, "«out of memory»"),
    "fastapi": (
        {
            "detail": [
                {"type": "missing", "loc": ["body", "prompt"], "msg": "Field required", "input": {}},
                {"type": "int_type", "loc": ["body", "n"], "msg": "not an integer"},
            ]
        },
        "«body.prompt: Field required; body.n: not an integer»",
    ),
    "no-choices": ({"choices": [], "error": {"message": "asleep"}}, "«asleep»"),
    "a-gateway": ({"message": "no route matched"}, "«no route matched»"),
    "detail-of-no-kind": ({"detail": {"code": 7}}, "{'code': 7}"),
    "long": ({"error": {"message": "x" * 10_000}}, "x" * 300 + "»"),
}


def of_vllm(answer: Any) -> Any:
    return from_vllm(answer, QWEN, prompt_token_ids=[1, 2], output_token_ids=[3], version="0.33.0")


def of_sglang(answer: Any) -> Any:
    return from_sglang(answer, QWEN, prompt_token_ids=[1, 2], output_ids=[3], version="0.5.23")


@pytest.mark.parametrize("decode", [of_vllm, of_sglang])
@pytest.mark.parametrize(("answer", "words"), REFUSALS.values(), ids=REFUSALS.keys())
def test_the_servers_own_words_are_quoted(answer: Any, words: str, decode: Callable[[Any], Any]) -> None:
    for form in (answer, json.dumps(answer)):
        with pytest.raises(InvalidRoutes, match="the server refused the request") as caught:
            decode(form)
        assert words in str(caught.value)
        assert len(str(caught.value)) < 1000


def test_vllm_names_the_flag_of_an_endpoint_that_isnt_there() -> None:
    """0.30.0 and 0.31.0 answer «Not Found»; later ones name it themselves."""
    with pytest.raises(InvalidRoutes, match=r"From 0\.30\.0 on .*/inference/v1/generate.*--enable-scale-out"):
        of_vllm({"detail": "Not Found"})
    with pytest.raises(InvalidRoutes) as caught:
        of_sglang({"detail": "Not Found"})
    assert "scale-out" not in str(caught.value)


@pytest.mark.parametrize("decode", [of_vllm, of_sglang])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        *((text, "cut off on its way") for text in ('{"choices": [{', b' {"a": {}}{"a": {}}', "[" * 100_000)),
        *((text, "a stream") for text in ('data: {"id": 1}\n\n', b"<html>502</html>", b"\xff\xfe\x00")),
    ],
)
def test_an_answer_that_was_cut_off_is_told_from_a_stream(
    text: Any, words: str, decode: Callable[[Any], Any]
) -> None:
    with pytest.raises(InvalidRoutes, match=rf"isn't JSON.*{words}"):
        decode(text)
