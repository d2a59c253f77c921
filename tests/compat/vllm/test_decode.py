"""What vLLM's decoder does alone. What every engine's does: tests/rollout/test_engine_contract.py."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import vllm_outputs
from npu_replay import fingerprint
from npu_replay.compat import probe
from npu_replay.compat.vllm.decode import from_vllm
from npu_replay.errors import InvalidRoutes, ReplayError
from npu_replay.rollout.model_config import RoutedModel
from vllm_outputs import (
    DEEPSEEK,
    QWEN,
    Endpoint,
    answer,
    expected,
    npy,
    request_output,
    sampled,
    siblings,
)


def refused(*words: str) -> Any:
    """An InvalidRoutes with these words, in this order."""
    return pytest.raises(InvalidRoutes, match="(?s)" + ".*".join(map(re.escape, words)))


# ---- section 0 of the facts: the layouts


def test_0_21_0rc1_of_vllm_ascend_splits_but_labels_columns() -> None:
    """It captures by decoder layer, where vLLM 0.21.0 counts MoE layers."""
    sample = sampled(DEEPSEEK)
    output = request_output("0.22.0", DEEPSEEK, sample)
    rows = output.outputs[0].routed_experts.astype(np.int16)
    split = vllm_outputs.RequestOutput021(
        "17", sample.prompt, prompt_routed_experts=rows[: len(sample.prompt)]
    )
    split.outputs = [replace(output.outputs[0], routed_experts=rows[len(sample.prompt) :])]
    assert from_vllm(split, DEEPSEEK, version="0.21.0") == [expected(DEEPSEEK, sample)]


@pytest.mark.parametrize("version", ["0.20.2", "0.21.0", "0.22.0", "0.31.0", "0.33.0"])
def test_each_of_several_completions_has_its_own_routes(version: str) -> None:
    several = siblings(DEEPSEEK, 3)
    for make in (request_output, *([answer] if version >= "0.21" else [])):
        routes = from_vllm(make(version, DEEPSEEK, *several), DEEPSEEK, version=version)
        assert routes == [expected(DEEPSEEK, sample) for sample in several]


BEAMS = SimpleNamespace(sequences=[SimpleNamespace(tokens=[1, 2], logprobs=[], cum_logprob=-1.0)])
ROWS = "choices[0].routed_experts"


@pytest.mark.parametrize(
    ("made", "options", "words"),
    [
        # /v1 endpoints know a start from 0.28.0 on; before, it is dropped
        (
            answer("0.23.0", QWEN, sampled(QWEN)),
            {"start": 64, "version": "0.23.0"},
            ("vLLM 0.23.0", ROWS, "more tokens", "from 0.28.0 on"),
        ),
        (
            answer("0.21.0", QWEN, sampled(QWEN)),
            {"start": 64, "version": "0.21.0"},
            ("vLLM 0.21.0", ROWS, "all rows of the prompt"),
        ),
        (BEAMS, {}, ("this isn't what vLLM gives", "beam search", "sample instead")),
    ],
    ids=["a start, 0.23.0", "a start, 0.21.0", "beam search"],
)
def test_what_the_engine_cannot_is_an_error_of_its_own(
    made: Any, options: dict[str, Any], words: tuple[str, ...]
) -> None:
    with refused(*words):
        from_vllm(made, QWEN, **options)


@pytest.mark.parametrize(
    ("prompt", "sampled", "start"), [([1], [], 0), ([1, 2, 3], [4], 3), ([1, 2, 3], [], 2)]
)
def test_no_row_is_due_in_any_form(prompt: list[int], sampled: list[int], start: int) -> None:
    """A list without rows doesn't tell the sizes of the other axes."""
    for rows in (np.zeros((0, QWEN.num_layers, QWEN.topk), np.uint8), [], None):
        choice = {"prompt_token_ids": prompt, "token_ids": sampled, "routed_experts": rows}
        (routes,) = from_vllm({"choices": [choice]}, QWEN, start=start)
        assert len(routes) == len(prompt + sampled)
        assert not routes.recorded.any()
    choice["routed_experts"] = np.zeros((0, QWEN.num_layers + 1, QWEN.topk), np.uint8)
    with refused("columns are neither"):
        from_vllm({"choices": [choice]}, QWEN, start=start)
    choice |= {"prompt_token_ids": [1, 2, 3, 4], "routed_experts": []}
    with refused("fewer tokens than it ran"):
        from_vllm({"choices": [choice]}, QWEN)


# ---- token ids that the answer hasn't got


def test_a_batch_of_prompts_in_one_answer_has_a_prompt_each() -> None:
    """/v1/completions takes several prompts at once, and its choices carry their own."""
    first = sampled(QWEN, seed=1)
    second = sampled(QWEN, prompt=30, seed=2)
    sent = answer("0.33.0", QWEN, first)
    sent["choices"] += answer("0.33.0", QWEN, second)["choices"]
    assert from_vllm(sent, QWEN) == [expected(QWEN, first), expected(QWEN, second)]
    for choice in sent["choices"]:
        del choice["prompt_token_ids"]
    prompts = [first.prompt, second.prompt]
    assert from_vllm(sent, QWEN, prompt_token_ids=prompts) == [expected(QWEN, first), expected(QWEN, second)]


def test_0_21_0_answers_a_batch_of_prompts_with_the_rows_of_the_first() -> None:
    first = sampled(QWEN, seed=1)
    second = sampled(QWEN, seed=2)
    sent = answer("0.21.0", QWEN, first)
    sent["choices"] += answer("0.21.0", QWEN, second)["choices"]
    with refused("completion 1", "prompt_routed_experts", "several prompts", "one prompt a request"):
        from_vllm(sent, QWEN)


# ---- which completion


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_choices_are_numbered_by_their_own_index(endpoint: Endpoint) -> None:
    several = siblings(QWEN, 3)
    sent = answer("0.33.0", QWEN, *several, endpoint=endpoint)
    sent["choices"] = [sent["choices"][place] for place in (2, 0, 1)]
    assert from_vllm(sent, QWEN) == [expected(QWEN, sample) for sample in several]
    sent["choices"][0]["routed_experts"] = None
    with refused("completion 2, choices[2]"):
        from_vllm(sent, QWEN)


@pytest.mark.parametrize("given", [[[1], [2], [3]], [1, 2]])
def test_ids_for_another_number_of_completions_are_refused(given: Any) -> None:
    output = request_output("0.33.0", QWEN, *siblings(QWEN, 2))
    with pytest.raises(ReplayError, match=r"output_token_ids doesn't fit.*Expected 2 lists"):
        from_vllm(output, QWEN, output_token_ids=given)


# ---- how a completion ended


def test_0_21_0_may_have_one_row_more_with_mtp() -> None:
    """It cuts the completion's part to as many rows as tokens, which is one more than there should be."""
    sample = sampled(QWEN)
    longer = replace(sample, output=[*sample.output, 5], rows=np.concatenate([sample.rows, sample.rows[:1]]))
    made = answer("0.21.0", QWEN, longer)
    made["choices"][0]["token_ids"] = sample.output
    assert from_vllm(made, QWEN, version="0.21.0") == [expected(QWEN, sample)]
    cut = replace(sample, output=sample.output[:25], rows=sample.rows[: len(sample.prompt) + 25])
    (routes,) = from_vllm(made, QWEN, version="0.21.0", output_token_ids=cut.output)
    assert routes == expected(QWEN, cut, rows=len(cut.tokens))


@pytest.mark.parametrize("version", ["0.18.0", "0.20.2", "0.21.0"])
def test_a_stop_string_loses_the_routes_before_0_22_0(version: str) -> None:
    """The scheduler looks them up for requests that it ends itself; stop strings are found outside of it."""
    sample = sampled(QWEN, finish_reason="stop", stop_reason="</s>")
    output = request_output(version, QWEN, sample)
    output.outputs[0].routed_experts = None
    if isinstance(output, vllm_outputs.RequestOutput021):
        output.prompt_routed_experts = None
    with refused(f"vLLM {version}, request 17", "no routes", "a stop string ended it", "stop_token_ids"):
        from_vllm(output, QWEN, version=version)
    (routes,) = from_vllm(output, QWEN, version=version, missing="native")
    assert not routes.recorded.any()
    assert routes.fingerprint == fingerprint(sample.tokens)
    with refused("no routes"):  # a later release doesn't lose them, so something else is wrong
        from_vllm(output, QWEN, version="0.22.0", missing="native")


@pytest.mark.parametrize("version", ["0.14.0", "0.20.2", "0.21.0", "0.22.0"])
def test_t28_an_aborted_turn_has_the_rows_that_are_there(version: str) -> None:
    """0.14 to 0.21 have none of an aborted request; later ones those of all tokens that it has, or none."""
    sample = sampled(DEEPSEEK, finish_reason="abort")
    made: Any = request_output(version, DEEPSEEK, sample)
    if version == "0.22.0":
        assert from_vllm(made, DEEPSEEK, version=version) == [expected(DEEPSEEK, sample)]
    made.outputs[0].routed_experts = made.prompt_routed_experts = None
    assert from_vllm(made, DEEPSEEK, version=version) == [expected(DEEPSEEK, sample, rows=0)]


def test_an_unfinished_output_is_told_so() -> None:
    output = request_output("0.33.0", QWEN, replace(sampled(QWEN), finish_reason=None))
    output.outputs[0].routed_experts = None
    with refused("isn't finished", "the output whose finish_reason is set"):
        from_vllm(output, QWEN, version="0.33.0")


OLDER = "a release that nobody checks"
MISSING = [
    ("0.13.0", False, OLDER),
    ("0.14.0", True, OLDER),
    ("0.20.2", True, "in-process (LLM, AsyncLLM)"),
    ("0.20.2", False, "without enable_return_routed_experts=True"),
    ("0.22.0", True, "without enable_return_routed_experts=True"),
    ("", True, "over HTTP"),
    ("", True, "or the engine was started without"),
]


@pytest.mark.parametrize(("version", "over_http", "cause"), MISSING)
def test_none_from_a_completion_that_ended_is_an_error(version: str, over_http: bool, cause: str) -> None:
    made: Any = (answer if over_http else request_output)("0.22.0", QWEN, sampled(QWEN))
    if over_http:
        del made["choices"][0]["routed_experts"]
        name = "request cmpl-17"
        place = "choices[0]"
    else:
        made.outputs[0] = SimpleNamespace(token_ids=made.outputs[0].token_ids, finish_reason="length")
        name = "request 17"
        place = "outputs[0]"
    engine = f"vLLM {version}".rstrip()
    with refused(f"{engine}, {name}, completion 0, {place}.routed_experts", "no routes", "None", cause):
        from_vllm(made, QWEN, version=version)


# ---- sections 1 and 2 of the facts: what goes wrong, and in which words


def broken(version: str, model: RoutedModel, change: Any, **options: Any) -> Any:
    """An output of that release whose array `change` has changed in place."""
    output = request_output(version, model, sampled(model, **options))
    change(output.outputs[0].routed_experts)
    return output


def put(value: Any, *place: Any) -> Any:
    return lambda rows: rows.__setitem__(place, value)


def copy_of(*source: Any, to: Any) -> Any:
    return lambda rows: rows.__setitem__(to, rows[source])


def physical(rows: Any) -> None:
    rows[rows == 3] = QWEN.num_experts + 1  # the copy of expert 3


ALL = slice(None)
zero = put(0, ...)
stage = put(0, ALL, slice(3))
draft = copy_of(ALL, 3, to=(ALL, 0))
shifted = copy_of(ALL, 3, to=(ALL, 1))
stale = copy_of(slice(16), to=slice(64, 80))
FEW = {"prompt": 5, "output": 5}
COPIES = ("out of range", "0 to 127", "129", "physical ids under EPLB")
MTP = ("layer 0: a dense layer has experts", "MTP draft", "fixed in 0.26.0 (vllm#48622)")
OTHERS = ("layer 1: a dense layer has experts", "the config given here")

# model, what is wrong, of how many tokens, and what each release says of it: vLLM, vllm-ascend, words
BROKEN: list[tuple[RoutedModel, Any, dict[str, Any], list[tuple[str, ...]]]] = [
    (
        *(QWEN, zero, {}),
        [
            ("0.15.1", "", OLDER),
            ("0.20.2", "", "monolithic MoE kernels", "vllm#44116"),
            ("0.23.0", "0.23.0", "captures no quantized experts", "0.27.1rc1"),
            ("0.26.0", "0.26.0rc1", "0.26.0rc1 skips the capture", "16314"),
            ("0.20.2", "", "on a CPU", "before 0.30.0"),
            ("0.26.0", "", "monolithic", "0.24.0rc1 to 0.26.0rc1 all do"),
            ("0.27.0", "", "past vLLM's routers", "nothing is captured"),
            *((version, "", "past vLLM's routers") for version in ("", "nightly", "0.1.dev123+g1a2b3c")),
        ],
    ),
    (QWEN, physical, {}, [("0.14.0", "", OLDER), ("0.21.0", "", *COPIES, "0.22.0")]),
    *(
        (QWEN, stage, few, [(version, "", "layer 0", "pipeline_parallel_size=1")])
        for version in ("0.18.0", "0.20.2")
        for few in ({}, FEW)
    ),
    (DEEPSEEK, draft, {}, [("0.22.0", "", *MTP), ("0.25.1", "", *MTP)]),
    (DEEPSEEK, shifted, {}, [("0.22.0", "", *OTHERS), ("0.26.0", "", *OTHERS)]),
    (QWEN, stale, {}, [("0.20.2", "", "16 rows are another token's", "KV cache slots")]),
    (
        *(DEEPSEEK, put(0, slice(16, 32)), {}),
        [
            ("0.18.0", "", "linear attention", "0.22.0"),
            ("0.20.2", "", "wrong KV cache group", "vllm#37118"),
            ("0.21.0", "", "prefix cache", "enable_prefix_caching=False"),
            ("0.22.0", "", "NeMo-RL", 'missing="native"'),
            ("0.28.0", "0.28.0rc1", "KV cache group 0"),
            ("0.23.0", "0.23.0", "one tensor-parallel rank's tokens"),
        ],
    ),
]


@pytest.mark.parametrize(
    ("model", "change", "tokens", "version", "vllm_ascend", "words"),
    [
        (model, change, tokens, version, vllm_ascend, words)
        for model, change, tokens, releases in BROKEN
        for version, vllm_ascend, *words in releases
    ],
)
def test_t32_wrong_rows_name_the_release_that_makes_them(
    model: RoutedModel, change: Any, tokens: dict[str, Any], version: str, vllm_ascend: str, words: list[str]
) -> None:
    """A version that tells no release stands for any: its words aren't those of the oldest."""
    output = broken("0.20.2", model, change, **tokens)
    with refused(f"vLLM {version}".rstrip(), "request 17", *words):
        from_vllm(output, model, version=version, vllm_ascend=vllm_ascend)


# ---- weight versions and releases


@pytest.mark.parametrize(
    ("spans", "given", "found"),
    [
        ([("7", 0, 40)], None, "7"),
        ([("7", 0, 12), ("8", 12, 40)], None, None),
        ([("7", 0, 40)], 9, 9),
        ([("default", 0, 40)], None, None),
        (None, None, None),
        ([], None, None),
        ([(["a"], 0, 40)], None, None),
    ],
)
def test_0_33_0_names_the_weights_that_sampled(spans: Any, given: Any, found: Any) -> None:
    made = request_output("0.33.0", QWEN, sampled(QWEN))
    made.outputs[0].weight_versions = spans and [
        SimpleNamespace(**dict(zip(("version", "start", "end"), span, strict=True))) for span in spans
    ]
    (routes,) = from_vllm(made, QWEN, weight_version=given)
    assert routes.weight_version == found


def test_the_installed_release_is_asked_for_objects_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer comes from another machine, with another vLLM."""
    releases = {"vllm": "0.26.0", "vllm-ascend": "0.26.0rc1"}
    monkeypatch.setattr(probe, "installed", lambda name: releases.get(name, ""))
    with refused("vLLM 0.26.0, request", "0.26.0rc1 skips"):
        from_vllm(broken("0.22.0", QWEN, zero), QWEN)
    made = answer("0.22.0", QWEN, sampled(QWEN))
    made["choices"][0]["routed_experts"] = npy(vllm_outputs.engine_rows("0.22.0", QWEN, sampled(QWEN)) * 0)
    with refused("vLLM, request", "FlashInfer"):
        from_vllm(made, QWEN)


@pytest.mark.parametrize(
    ("fingerprint", "given", "engine"),
    [
        ("vllm-0.30.0-3ea666b7", None, "vLLM 0.30.0, request"),
        ("vllm-0.33.0-tp2-ep4-3ea666b7", None, "vLLM 0.33.0, request"),
        ("vllm-0.30.0-3ea666b7", "0.31.0", "vLLM 0.31.0, request"),
        ("our own", None, "vLLM, request"),
        (7, None, "vLLM, request"),
    ],
)
def test_an_answer_says_its_release_itself(fingerprint: Any, given: str | None, engine: str) -> None:
    sent = answer("0.30.0", QWEN, sampled(QWEN)) | {"system_fingerprint": fingerprint}
    sent["choices"][0]["routed_experts"] = None
    with refused(engine, "no routes"):
        from_vllm(sent, QWEN, version=given)


def test_a_path_that_isnt_there_has_its_flag_named() -> None:
    """vLLM 0.30.0 and 0.31.0 answer «Not Found»; later ones name the flag themselves."""
    with refused("Not Found", "--enable-scale-out"):
        from_vllm({"detail": "Not Found"}, QWEN, prompt_token_ids=[1], output_token_ids=[2])
