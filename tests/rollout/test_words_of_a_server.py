"""What a server says instead of an answer is quoted on one line, and printable."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from npu_replay import RoutedModel, from_sglang, from_vllm
from npu_replay.errors import InvalidRoutes, ReplayError

MODEL = RoutedModel(layers=(0, 1), num_layers=2, num_experts=8, topk=2)
ROWS = np.array([[[3, 1], [2, 0]], [[1, 4], [5, 2]]], np.uint8)
CLEAR = "\x1b[2J\x1b]0;owned\x07"
WORDS = [CLEAR, "\ud800", "\u202e", "\x9b31m", "one\rtwo\nthree", "x" * 100_000]
CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e\ud800-\udfff]")


def choice(**more: Any) -> dict[str, Any]:
    return {"prompt_token_ids": [1, 2], "token_ids": [3], "routed_experts": ROWS.tolist(), **more}


def refused(answer: Any, engine: str = "vllm") -> str:
    with pytest.raises(ReplayError) as raised:
        if engine == "vllm":
            from_vllm(answer, MODEL)
        else:
            from_sglang(answer, MODEL, prompt_token_ids=[1, 2], output_ids=[3])
    error = raised.value
    for text in (str(error), error.problem, error.where, error.cause):
        assert not CONTROL.search(text), ascii(text)
        assert len(text) < 3000
        text.encode()
    return str(error)


@pytest.mark.parametrize("words", WORDS, ids=lambda words: ascii(words)[:12])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_a_servers_words_are_quoted_on_one_line_and_printable(engine: str, words: str) -> None:
    for said in (words, [[[[words]]]], {"msg": words, "loc": [words, {words: words}]}, {words: [words]}):
        message = refused({"detail": said}, engine)
        assert "the server refused the request" in message
        assert "three\n" not in message


@pytest.mark.parametrize(
    ("prompt", "sampled", "start"), [([1], [], 0), ([1, 2, 3], [4], 3), ([1, 2, 3], [], 2)]
)
def test_no_row_is_due_in_any_form(prompt: list[int], sampled: list[int], start: int) -> None:
    """A list without rows doesn't tell the sizes of the other axes."""
    for rows in (np.zeros((0, 2, 2), np.uint8), [], None):
        told = {"prompt_token_ids": prompt, "token_ids": sampled, "routed_experts": rows}
        (routes,) = from_vllm({"choices": [told]}, MODEL, start=start)
        assert len(routes) == len(prompt + sampled)
        assert not routes.recorded.any()
    told["routed_experts"] = np.zeros((0, 3, 2), np.uint8)
    with pytest.raises(InvalidRoutes, match="columns are neither"):
        from_vllm({"choices": [told]}, MODEL, start=start)
    told |= {"prompt_token_ids": [1, 2, 3, 4], "routed_experts": []}
    with pytest.raises(InvalidRoutes, match="fewer tokens than it ran"):
        from_vllm({"choices": [told]}, MODEL, start=0)
