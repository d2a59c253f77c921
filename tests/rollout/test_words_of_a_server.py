"""What an answer says is text of a size and printable before it is hashed, walked or printed."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import npu_replay
from command_line import invoke
from npu_replay import RoutedModel, from_sglang, from_vllm
from npu_replay.errors import InvalidRoutes, ReplayError, quoted

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
    deep: Any = words
    for _ in range(600):
        deep = [deep]
    for said in (
        words,
        [words],
        [[[[words]]]],
        {"msg": words, "loc": [words, {words: words}]},
        {words: [words]},
        deep,
    ):
        for key in ("error", "detail", "message"):
            message = refused({key: said}, engine)
            assert "the server refused the request" in message
            assert "three\n" not in message


@pytest.mark.parametrize("words", WORDS, ids=lambda words: ascii(words)[:12])
def test_what_an_answer_calls_itself_is_quoted_too(words: str) -> None:
    rows = {"routed_experts": "not base64"}
    refused({"id": words, "choices": [choice(**rows, finish_reason=words, stop_reason=words)]})
    refused({"id": words, "choices": [choice(routed_experts=None, finish_reason=words)]})
    refused({words: 1})
    refused({"choices": [{words: 1}], "object": words})
    refused({"choices": [{"delta": {}}], "object": words})
    for info in ({"id": words}, {"id": 1, "weight_versions": words}, {"num_retractions": words}):
        refused({"meta_info": {**rows, "prompt_tokens": 2, "completion_tokens": 1, **info}}, "sglang")
    spans = [{"start": 0, "end": 3, "version": words}]
    (routes,) = from_vllm({"choices": [choice(weight_versions=spans)]}, MODEL)
    assert not CONTROL.search(str(routes.weight_version))
    assert len(str(routes.weight_version)) <= 500


ENVELOPE = {"data": "AwECAAEEBQI=", "shape": [2, 2, 2], "dtype": "uint8", "start": 0}
ODD: list[Any] = [
    ["uint8"],
    {"a": 1},
    {"a": {"b": []}},
    CLEAR,
    "\ud800",
    10**6000,
    1.5,
    True,
    b"u1",
    [[]] * 10_000,
]


@pytest.mark.parametrize("key", ENVELOPE)
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: type(odd).__name__)
def test_an_envelopes_parts_are_of_a_kind_before_they_are_used(key: str, odd: Any) -> None:
    envelope = {**ENVELOPE, key: odd}
    refused({"choices": [choice(routed_experts=envelope)]})
    refused({"meta_info": {"routed_experts": envelope, "prompt_tokens": 2, "completion_tokens": 1}}, "sglang")
    from_vllm({"choices": [choice(routed_experts=ENVELOPE)]}, MODEL)


def test_a_list_that_is_longer_than_its_envelope_says_is_not_walked() -> None:
    class Numbers(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError("walked")

    envelope = {**ENVELOPE, "data": Numbers([1] * 9)}
    with pytest.raises(InvalidRoutes, match="Expected 8 ids, as its shape says, got 9"):
        from_vllm({"choices": [choice(routed_experts=envelope)]}, MODEL)
    for large in (1 << 40, 10**400):
        with pytest.raises(InvalidRoutes, match="unknown form"):
            from_vllm({"choices": [choice(routed_experts={**ENVELOPE, "data": [large] * 8})]}, MODEL)


@pytest.mark.parametrize("words", [CLEAR, "\ud800"], ids=ascii)
def test_inspect_and_the_log_show_no_control_characters(
    words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = {"routed_experts": ROWS.tolist()}
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2}))
    for number, answer in enumerate(
        (
            {"error": {"message": words}},
            {"id": words, "choices": [choice(finish_reason=words), choice(index=1, routed_experts=words)]},
            {"choices": [choice(routed_experts={**ENVELOPE, "dtype": [words]})]},
            {words: words},
            {"meta_info": {**rows, "id": words}},
        )
    ):
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(answer))
        ended = invoke("inspect", path, "--config", config)
        assert "Traceback" not in ended.output
        assert not CONTROL.search(ended.output), ascii(ended.output)
        ended.output.encode()
    with caplog.at_level(logging.WARNING):
        logging.getLogger("npu_replay").warning(
            "%s", ReplayError("told", got=words, cause=words, where=words)
        )
    assert not CONTROL.search(caplog.text)


def test_our_own_lines_stay_and_a_quoted_text_is_one() -> None:
    assert str(ReplayError("a", cause=npu_replay.errors.likeliest("b", "c"))).count("\n") == 3
    assert quoted("one\n\x1b[0m two  three", 12) == "one \\x1b[0m two"


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
