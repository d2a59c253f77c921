"""SGLang's answers, in each release's form, become routes or an error that names the fault."""

from __future__ import annotations

import base64
import copy
import json
import logging
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from npu_replay import fingerprint
from npu_replay.compat.sglang import decode, old_path
from npu_replay.compat.sglang.decode import from_sglang
from npu_replay.compat.sglang.faults import FAULTS
from npu_replay.compat.sglang.launch import engine_arguments, request_arguments
from npu_replay.errors import InvalidRoutes, ReplayError
from npu_replay.rollout.faults import Source, Symptom, release
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.routes.checks import Array
from npu_replay.routes.routed_experts import RoutedExperts
from sglang_outputs import RELEASES, WITH_SGLEXT, Request, true_rows

MODEL = RoutedModel(layers=(1, 2, 3, 4, 5), num_layers=6, num_experts=64, topk=4)
PROMPT, OUTPUT = 12, 70


def request(
    version: str, *, prompt: int = PROMPT, output: int = OUTPUT, past: int = 0, **about: Any
) -> Request:
    """A request of random tokens; `past` tokens were run behind its end."""
    tokens = np.random.default_rng(7).permutation(50_000)[: prompt + output].tolist()
    rows = true_rows(MODEL, prompt + output - 1 + past)
    return Request(version, tokens[:prompt], tokens[prompt:], rows, **about)


def decoded(answer: Any, asked: Request, **options: Any) -> RoutedExperts:
    given = {"prompt_token_ids": asked.prompt, "output_ids": asked.output, "version": asked.version}
    return from_sglang(answer, MODEL, **{**given, **options})


def assert_true(routes: RoutedExperts, asked: Request, start: int = 0) -> None:
    tokens = len(asked.prompt) + len(asked.output)
    assert (len(routes), routes.layers, routes.num_experts) == (tokens, MODEL.layers, MODEL.num_experts)
    assert routes.recorded.tolist() == [start <= row < tokens - 1 for row in range(tokens)]
    truth = asked.rows[start : tokens - 1, 1:]
    np.testing.assert_array_equal(routes.ids[start : tokens - 1].numpy(), truth)
    assert routes.fingerprint == fingerprint([*asked.prompt, *asked.output])


def with_payload(asked: Request, payload: Any) -> dict[str, Any]:
    answer = asked.generate()
    answer["meta_info"]["routed_experts"] = payload
    return answer


def text_of(rows: Array) -> str:
    return base64.b64encode(np.ascontiguousarray(rows, dtype=np.int32).tobytes()).decode()


# Every release's own form


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("tokenizer", [True, False], ids=["", "skip_tokenizer_init"])
def test_generate_of_sglang(version: str, tokenizer: bool) -> None:
    asked = request(version)
    assert_true(decoded(asked.generate(skip_tokenizer_init=not tokenizer), asked), asked)


@pytest.mark.parametrize("version", RELEASES)
def test_meta_info_alone_of_sglang(version: str) -> None:
    asked = request(version)
    assert_true(decoded(asked.meta_info(), asked), asked)
    assert_true(decoded(asked.meta_info(), asked, version=None), asked)


@pytest.mark.parametrize("version", WITH_SGLEXT)
@pytest.mark.parametrize("kind", ["chat.completion", "text_completion"])
def test_sglext_of_sglang(version: str, kind: str) -> None:
    asked = request(version)
    assert_true(decoded(asked.openai(kind), asked), asked)


@pytest.mark.parametrize("version", RELEASES)
def test_tokens_come_from_the_answer_of_sglang(version: str) -> None:
    asked = request(version)
    routes = from_sglang(asked.generate(), MODEL, prompt_token_ids=asked.prompt, version=version)
    assert_true(routes, asked)
    whole = {**asked.generate(), "prompt_token_ids": asked.prompt}
    assert_true(from_sglang(whole, MODEL, version=version), asked)


WITH_META_INFO = [version for version in RELEASES if release(version) >= (0, 5, 13)]


@pytest.mark.parametrize("version", WITH_META_INFO)
def test_a_choice_with_its_own_meta_info_of_sglang(version: str) -> None:
    """With return_meta_info the choices have them, and from 0.5.19 on sglext hasn't."""
    asked = request(version)
    body = asked.openai(meta_info=True)
    assert ("sglext" in body) == (release(version) < (0, 5, 19))
    assert_true(decoded(body, asked), asked)
    for choice in asked.openai(choices=2, meta_info=True)["choices"]:
        assert_true(decoded(choice, asked), asked)


@pytest.mark.parametrize("version", ["0.5.19", "0.5.23"])
def test_T29_a_choices_meta_info_says_of_retractions(version: str) -> None:
    asked = request(version, weights=[("7", 0), ("8", 30)], retractions=1)
    with pytest.raises(InvalidRoutes, match="retracted 1 times"):
        decoded(asked.openai(meta_info=True), asked)


@pytest.mark.parametrize("encoded", [str, bytes, bytearray])
def test_json_as_it_came_over_http(encoded: type) -> None:
    asked = request("0.5.23")
    for answer in (asked.generate(), asked.meta_info(), asked.openai()):
        text = json.dumps(answer)
        assert_true(decoded(text if encoded is str else encoded(text.encode()), asked), asked)


class Completion:
    """As OpenAI's client gives an answer: an object that keeps what it doesn't know."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.choices = body["choices"]
        self.model_dump = lambda: body


def test_the_object_of_openais_client() -> None:
    asked = request("0.5.23")
    assert_true(decoded(Completion(asked.openai()), asked), asked)


def test_the_openai_endpoint_gives_one_choices_routes_only() -> None:
    asked = request("0.5.23")
    with pytest.raises(InvalidRoutes, match=r"first choice only.*n=1.*2 choices"):
        decoded(asked.openai(choices=2), asked)


@pytest.mark.parametrize(
    "form",
    [
        lambda rows: torch.from_numpy(rows),
        lambda rows: torch.from_numpy(rows).flatten(),
        lambda rows: rows.reshape(len(rows), -1),
        lambda rows: rows.astype(np.int64),
        lambda rows: rows.astype(">i4"),
        lambda rows: rows.tobytes(),
        lambda rows: bytearray(rows.tobytes()),
        lambda rows: memoryview(rows.tobytes()),
        lambda rows: base64.b64encode(rows.tobytes()),
        lambda rows: rows[:, 1:],
    ],
    ids=[
        *("tensor", "flat tensor", "two axes", "int64", "big endian", "bytes", "bytearray", "memoryview"),
        *("base64 as bytes", "MoE layers alone, in a shape"),
    ],
)
def test_forms_that_a_framework_makes_of_it(form: Any) -> None:
    asked = request("0.5.23")
    assert_true(decoded(with_payload(asked, form(asked.rows)), asked), asked)


def test_a_sequence_of_one_token_has_no_rows() -> None:
    asked = request("0.5.23", prompt=1, output=0)
    assert asked.meta_info()["routed_experts"] == ""
    assert_true(decoded(asked.generate(), asked), asked)
    assert_true(decoded(asked.openai(), asked), asked)  # sglext leaves an empty text out


# The rows of the table in facts: what each release does and doesn't


def test_sglang_0_5_6_has_no_routes() -> None:
    asked = request("0.5.7")
    info = asked.meta_info()
    del info["routed_experts"]
    with pytest.raises(InvalidRoutes, match=r"SGLang 0\.5\.6.*no routes.*from 0\.5\.7 on"):
        decoded(info, asked, version="0.5.6")
    with pytest.raises(ReplayError, match=r"can't return routes.*0\.5\.7 or later"):
        engine_arguments("0.5.6.post2")
    with pytest.raises(ReplayError, match="can't return routes"):
        request_arguments("0.5.6")


def test_T32_sglang_0_5_7_physical_ids_under_eplb_are_named() -> None:
    asked = request("0.5.7")
    asked.rows[3, 2, 1] = 70  # a place beyond the experts
    with pytest.raises(InvalidRoutes, match=r"out of range.*70.*on CUDA EPLB was on.*0\.5\.10"):
        decoded(asked.generate(), asked)
    for planned in (
        {"enable_eplb": True},
        {"ep_num_redundant_experts": 16},
        {"init_expert_location": "places.json"},
        {"ep_dispatch_algorithm": "static"},
    ):
        with pytest.raises(ReplayError, match="ids of places"):
            engine_arguments("0.5.9", planned=planned)
        engine_arguments("0.5.10", planned=planned)
    engine_arguments("0.5.9", planned={"init_expert_location": "trivial", "enable_eplb": False})


def test_sglang_0_5_7_turns_on_by_one_argument_and_the_scheduler_waits() -> None:
    plan = engine_arguments("0.5.7", planned={"tp_size": 8})
    assert plan.arguments == {"tp_size": 8, "enable_return_routed_experts": True}
    assert plan.command_line() == ["--tp-size", "8", "--enable-return-routed-experts"]
    assert request_arguments("0.5.7") == {"return_routed_experts": True}
    assert any("return_routed_experts=True" in words for words in plan.limits)
    assert any("/generate only" in words for words in plan.limits)
    assert any("waits for the routes" in words for words in plan.limits)


@pytest.mark.parametrize("version", ["0.5.7", "0.5.8"])
def test_sglang_0_5_7_and_0_5_8_zeros_on_an_npu(version: str) -> None:
    asked = request(version)
    with pytest.raises(InvalidRoutes, match=r"rows are zeros.*NPU.*fixed in 0\.5\.9"):
        decoded(with_payload(asked, text_of(np.zeros_like(asked.rows))), asked)
    with pytest.raises(ReplayError, match="zeros on an NPU"):
        engine_arguments(version, device="npu")
    engine_arguments(version)


@pytest.mark.parametrize("device", ["npu:0", "NPU", "ascend", ""])
def test_a_device_of_another_spelling_is_no_way_past_what_an_npu_cant(device: Any) -> None:
    with pytest.raises(ReplayError, match="unknown device"):
        engine_arguments("0.5.7", device=device)


def test_sglang_0_5_9_physical_ids_on_an_npu() -> None:
    asked = request("0.5.9")
    asked.rows[0, 5, 0] = 64
    with pytest.raises(InvalidRoutes, match="EPLB was on"):
        decoded(asked.generate(), asked)
    engine_arguments("0.5.9", device="npu")
    with pytest.raises(ReplayError, match="ids of places"):
        engine_arguments("0.5.9", planned={"enable_eplb": True}, device="npu")


def test_sglang_0_5_9_brings_sglext() -> None:
    asked = request("0.5.9")
    assert set(asked.openai()["sglext"]) == {"routed_experts"}
    assert not any("/generate only" in words for words in engine_arguments("0.5.9").limits)
    assert any("first choice only" in words for words in engine_arguments("0.5.9").limits)


@pytest.mark.parametrize("version", ["0.5.10", "0.5.12", "0.5.15", "0.5.22"])
def test_sglang_0_5_10_logical_on_cuda_physical_on_an_npu_until_0_5_22(version: str) -> None:
    planned = {"enable_eplb": True}
    engine_arguments(version, planned=planned)
    with pytest.raises(ReplayError, match=r"ids of places on an NPU.*can't be seen.*0\.5\.23"):
        engine_arguments(version, planned=planned, device="npu")
    with pytest.raises(ReplayError, match="on an NPU"):
        engine_arguments(version, planned={**planned, "device": "npu"})
    asked = request(version)
    asked.rows[0, 5, 0] = 64
    with pytest.raises(InvalidRoutes, match=r"on an NPU EPLB was on.*fixed in 0\.5\.23"):
        decoded(asked.generate(), asked)


def test_sglang_0_5_10_text_under_skip_tokenizer_init() -> None:
    before, after = (engine_arguments(version).limits for version in ("0.5.9", "0.5.10"))
    assert any("skip_tokenizer_init" in words for words in before)
    assert not any("skip_tokenizer_init" in words for words in after)
    asked = request("0.5.10")
    assert isinstance(asked.meta_info(skip_tokenizer_init=True)["routed_experts"], str)
    asked = request("0.5.9")
    assert isinstance(asked.meta_info(skip_tokenizer_init=True)["routed_experts"], torch.Tensor)


def test_sglang_0_5_11_scheduler_no_longer_waits() -> None:
    before, after = (engine_arguments(version).limits for version in ("0.5.10.post1", "0.5.11"))
    assert any("waits" in words for words in before)
    assert not any("waits" in words for words in after)


def test_sglang_0_5_12_gathers_under_deepep_and_honours_the_start() -> None:
    with pytest.raises(ReplayError, match=r"own share.*0\.5\.12"):
        engine_arguments("0.5.11", planned={"moe_a2a_backend": "deepep"})
    engine_arguments("0.5.11", planned={"moe_a2a_backend": "none"})
    engine_arguments("0.5.12", planned={"moe_a2a_backend": "deepep"})
    assert request_arguments("0.5.11", start_len=9) == {"return_routed_experts": True}
    assert request_arguments("0.5.12", start_len=9)["routed_experts_start_len"] == 9
    asked = request("0.5.11")
    asked.rows[4:9] = 0  # another rank's share
    with pytest.raises(InvalidRoutes, match=r"5 of 81 rows.*DeepEP"):
        decoded(asked.generate(), asked)


OLD_PATH = """
import sys
from npu_replay.compat.sglang import old_path as sglang
def imported():
    from sglang.srt.layers.moe.routed_experts_capturer import extract_routed_experts_from_meta_info as found
    return found
def missing():
    try: return not imported()
    except ModuleNotFoundError as error: return "routed_experts_capturer" in str(error)
sglang.install(); sglang.install()
there = "" if missing() else imported()(None)
sglang.uninstall()
print(there, missing(), any("sglang" in type(one).__module__ for one in sys.meta_path))
"""


OLD_FILE, NEW_FILE = "srt/layers/moe/routed_experts_capturer", "srt/state_capturer/routed_experts"


@pytest.mark.parametrize(
    ("version", "files", "printed"),
    [
        ("0.5.6", (), "True False"),
        ("0.5.11", (OLD_FILE,), f"{OLD_FILE} False False"),
        ("0.5.12", (NEW_FILE,), f"{NEW_FILE} True False"),
        ("one with both", (OLD_FILE, NEW_FILE), f"{OLD_FILE} False False"),
    ],
)
def test_the_capturers_old_name_of_sglang(
    version: str, files: tuple[str, ...], printed: str, tmp_path: Path
) -> None:
    """verl 0.7 to 0.9.1 imports the name that 0.5.12 took away."""
    for file in (OLD_FILE, *files):
        folder = (tmp_path / "sglang" / file).parent
        folder.mkdir(parents=True, exist_ok=True)
        for package in (folder, *folder.parents):
            if package.is_relative_to(tmp_path / "sglang"):
                (package / "__init__.py").touch()
    for file in files:
        source = f"def extract_routed_experts_from_meta_info(data):\n    return {file!r}\n"
        (tmp_path / "sglang" / f"{file}.py").write_text(source)
    done = subprocess.run(
        [sys.executable, "-c", OLD_PATH],
        text=True,
        capture_output=True,
        env=_environment(tmp_path),
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == (printed, "")


def test_the_old_name_stays_away_where_nothing_may_be_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NPU_REPLAY_DISABLE", "1")
    before = list(sys.meta_path)
    old_path.install()
    assert sys.meta_path == before


def _environment(path: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(path), "NPU_REPLAY_DISABLE": ""}


def test_sglang_0_5_15_leaves_the_draft_out() -> None:
    asked = request("0.5.14")
    asked.rows[:, 0] = [3, 1, 4, 2]
    with pytest.raises(InvalidRoutes, match=r"dense layer has experts.*layer 0|layer 0.*draft model"):
        decoded(asked.generate(), asked)
    for algorithm in ("EAGLE", "NEXTN"):
        planned = {"speculative_algorithm": algorithm, "speculative_eagle_topk": 1}
        with pytest.raises(ReplayError, match=r"layer 0 of the model.*0\.5\.15"):
            engine_arguments("0.5.14", planned=planned)
        engine_arguments("0.5.15", planned=planned)
    asked.version = "0.5.15"
    with pytest.raises(InvalidRoutes, match="another model than the engine's"):
        decoded(asked.generate(), asked)


def test_sglang_0_5_23_logical_on_an_npu() -> None:
    plan = engine_arguments("0.5.23", planned={"enable_eplb": True}, device="npu")
    assert plan.arguments["enable_return_routed_experts"] is True
    asked = request("0.5.23")
    asked.rows[0, 5, 0] = 64
    with pytest.raises(InvalidRoutes, match="another model than the engine's"):
        decoded(asked.generate(), asked)


@pytest.mark.parametrize("version", ["0.5.7", "0.5.11", "0.5.12", "0.5.12.post1"])
def test_rows_that_speculation_ran_past_the_end_until_sglang_0_5_12(version: str) -> None:
    """The engine's counts of speculation say by how many, so the number of rows is known."""
    asked = request(version, past=5, finish="stop", drafts=6)
    assert_true(decoded(asked.generate(), asked), asked)
    with pytest.raises(InvalidRoutes, match=r"rows for other tokens.*86.*before 0\.5\.13"):
        decoded(asked.generate(), asked, version=None)
    for rows in (80, 82, 85, 87):
        with pytest.raises(InvalidRoutes, match=r"rows for other tokens.*81 rows"):
            decoded(with_payload(asked, text_of(true_rows(MODEL, rows))), asked)


@pytest.mark.parametrize("version", ["0.5.7", "0.5.10", "0.5.11", "0.5.12"])
def test_speculation_that_drops_the_drafts_behind_the_end(version: str) -> None:
    """EAGLE without overlap counts them as accepted, and has no rows for them."""
    asked = request(version, past=5, drafts=6)
    answer = with_payload(asked, text_of(asked.rows[:-5]))
    assert_true(decoded(answer, asked), asked)


BEFORE_0_5_13 = [version for version in RELEASES if release(version) < (0, 5, 13)]


@pytest.mark.parametrize("version", BEFORE_0_5_13)
def test_rows_past_the_end_without_a_reason_until_sglang_0_5_12(version: str) -> None:
    """Rows that nothing accounts for may as well lie before the first one."""
    plain = request(version, past=5, finish="stop")
    retracted = request(version, past=5, finish="stop", drafts=6, retractions=1)
    impossible = request(version, past=5, finish="stop", drafts=5)  # a verification adds four at most
    for asked in (plain, retracted, impossible):
        with pytest.raises(InvalidRoutes, match=r"rows for other tokens.*81 rows.*got 86.*speculative"):
            decoded(asked.generate(), asked)


@pytest.mark.parametrize("version", ["0.5.9", "0.5.12"])
def test_an_openai_answer_doesnt_count_drafts(version: str) -> None:
    asked = request(version, past=5, finish="stop", drafts=6)
    with pytest.raises(InvalidRoutes, match=r"got 86.*/generate, whose meta_info says by how much"):
        decoded(asked.openai(), asked)


def test_rows_past_the_end_are_cut_by_sglang_0_5_13() -> None:
    asked = request("0.5.13", past=5, finish="stop")
    assert_true(decoded(asked.generate(), asked), asked)
    whole = with_payload(asked, text_of(asked.rows))
    with pytest.raises(InvalidRoutes, match=r"81 rows.*got 86"):
        decoded(whole, asked)


def test_another_requests_routes_in_a_mixed_batch_until_sglang_0_5_12() -> None:
    """One request of a batch doesn't ask, so the list is shorter and the places shift."""
    asked = request("0.5.12")
    other = request("0.5.12", output=30)
    answer = with_payload(asked, other.meta_info()["routed_experts"])
    with pytest.raises(InvalidRoutes, match=r"rows for other tokens.*got 41.*another's routes.*0\.5\.13"):
        decoded(answer, asked)
    assert any("all requests" in words for words in engine_arguments("0.5.12").limits)
    assert not any("all requests" in words for words in engine_arguments("0.5.13").limits)


@pytest.mark.parametrize("version", ["0.5.7", "0.5.12", "0.5.23"])
def test_a_prefill_alone_of_sglang(version: str) -> None:
    """max_new_tokens=0, sglang#20964: the last token of the prompt ran, and its row is lost or cut off."""
    past = 0 if release(version) >= (0, 5, 13) else 1  # a token that is sampled and counted nowhere
    asked = request(version, output=0, past=past)
    assert_true(decoded(asked.generate(), asked), asked)
    far = with_payload(asked, text_of(true_rows(MODEL, PROMPT - 1 + past + 1)))
    with pytest.raises(InvalidRoutes, match=r"rows for other tokens.*Expected 11 rows"):
        decoded(far, asked)
    assert any("max_new_tokens=0" in words for words in engine_arguments(version).limits)


@pytest.mark.parametrize("version", ["0.5.7", "0.5.15", "0.5.23"])
@pytest.mark.parametrize(
    ("planned", "why"),
    [
        ({"pp_size": 2}, "one pipeline stage"),
        ({"--pipeline-parallel-size": "4"}, "one pipeline stage"),
        ({"pp": 2}, "one pipeline stage"),
        ({"--pp": "2"}, "one pipeline stage"),
        ({"enable_hierarchical_cache": True}, "sglang#26975"),
        ({"enable_lmcache": True}, "another sequence's routes"),
        ({"disaggregation_mode": "decode"}, "rows of the prompt"),
        ({"speculative_algorithm": "NGRAM"}, "sglang#37949"),
        ({"speculative_algorithm": "DSPARK"}, "nothing of the output"),
        ({"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 4}, "permuted"),
        ({"moe_runner_backend": "flashinfer_trtllm"}, "inside its kernel"),
        ({"moe_runner_backend": "triton_kernel"}, "inside its kernel"),
        ({"chunked_prefill_size": -1}, "sglang#26860"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_plans_that_no_release_of_sglang_can_do(version: str, planned: dict[str, Any], why: str) -> None:
    with pytest.raises(ReplayError, match=rf"SGLang {version}.*{why}"):
        engine_arguments(version, planned=planned)


@pytest.mark.parametrize("version", ["0.5.15", "0.5.23"])
def test_plans_that_sglang_can_do(version: str) -> None:
    planned = {
        "pp_size": 1,
        "enable_hierarchical_cache": False,
        "disaggregation_mode": "null",
        "speculative_algorithm": "EAGLE3",
        "speculative_eagle_topk": 1,
        "moe_runner_backend": "triton",
        "chunked_prefill_size": 8192,
        "moe_a2a_backend": "deepep",
        "speculative_num_steps": None,
    }
    plan = engine_arguments(version, planned=planned)
    drafts = {"speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
    assert plan.arguments == {**planned, **drafts, "enable_return_routed_experts": True}
    assert "enable_return_routed_experts" not in planned
    assert not any(option.startswith("--no-") for option in plan.command_line())  # SGLang knows none


def test_names_as_on_the_command_line() -> None:
    plan = engine_arguments("0.5.23", planned={"--tp-size": 8, "disable-radix-cache": True})
    assert plan.arguments["tp_size"] == 8
    assert plan.command_line() == [
        *("--tp-size", "8", "--disable-radix-cache", "--enable-return-routed-experts"),
    ]


def test_the_capture_cant_be_planned_away() -> None:
    plan = engine_arguments("0.5.23", planned={"enable_return_routed_experts": False})
    assert plan.arguments == {"enable_return_routed_experts": True}


def test_dflash_from_sglang_0_5_18_on() -> None:
    planned = {"speculative_algorithm": "DFLASH"}
    with pytest.raises(ReplayError, match=r"before 0\.5\.18"):
        engine_arguments("0.5.17", planned=planned)
    engine_arguments("0.5.18", planned=planned)


def test_the_buffer_under_dp_attention_until_sglang_0_5_12() -> None:
    planned = {"enable_dp_attention": True, "dp_size": 4, "max_running_requests": 8192}
    planned |= {"chunked_prefill_size": 4096}
    with pytest.raises(ReplayError, match="sglang#26123"):
        engine_arguments("0.5.12", planned=planned)
    engine_arguments("0.5.13", planned=planned)
    engine_arguments("0.5.12", planned={**planned, "max_running_requests": 2048})


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.5.14", "no MoE layers (sglang#26980"),
        ("0.5.23", "sglang#38717"),
        ("0.5.19", "beam search"),
        ("0.5.23", "beam search"),
        ("0.5.18", "this release doesn't say so"),
        ("0.5.23", "from_sglang refuses them"),
        ("0.5.23", "flush_cache=True"),
        ("0.5.10", "sglang#36404"),
        ("0.5.12", "gathered for deepep only"),
        ("0.5.7", "num_experts_per_tok and num_hidden_layers"),
        ("0.5.23", "hash layers"),
        ("0.5.11", "routed_experts_start_len is ignored"),
        ("0.5.9", "first choice only"),
        ("0.5.15", "name it"),
    ],
)
def test_limits_of_sglang(version: str, words: str) -> None:
    assert any(words in limit for limit in engine_arguments(version).limits)


def test_limits_that_end() -> None:
    assert not any("sglang#26980" in limit for limit in engine_arguments("0.5.15").limits)
    assert not any("beam" in limit for limit in engine_arguments("0.5.18").limits)
    assert not any("sglang#36404" in limit for limit in engine_arguments("0.5.9").limits)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "eagle3", "EAGLE", "NEXTN"])
def test_one_draft_a_step_where_eagle_would_choose_a_tree(algorithm: str) -> None:
    """0.5.7 chooses four for models that it doesn't know, and every release does for Grok. SGLang takes the
    three numbers together or not at all."""
    version = "0.5.7" if "3" in algorithm else "0.5.23"
    names = ("speculative_eagle_topk", "speculative_num_steps", "speculative_num_draft_tokens")
    for planned, numbers in (
        ({}, (1, 3, 4)),
        ({names[0]: 1}, (1, 3, 4)),
        ({names[1]: 5}, (1, 5, 6)),
        ({names[1]: "5"}, (1, "5", 6)),
        ({names[2]: 8}, (1, 7, 8)),
        (dict(zip(names, (1, 2, 3), strict=True)), (1, 2, 3)),
    ):
        plan = engine_arguments(version, planned={"speculative_algorithm": algorithm, **planned})
        assert tuple(plan.arguments[name] for name in names) == numbers
    adaptive = {"speculative_algorithm": algorithm, "speculative_adaptive": True}
    assert engine_arguments(version, planned=adaptive).arguments == {
        **adaptive,
        "speculative_eagle_topk": 1,
        "enable_return_routed_experts": True,
    }


def test_no_drafts_are_planned_where_nobody_asked_for_them() -> None:
    for algorithm in (None, "STANDALONE", "DFLASH"):
        plan = engine_arguments("0.5.23", planned={"speculative_algorithm": algorithm})
        assert set(plan.arguments) == {"speculative_algorithm", "enable_return_routed_experts"}


@pytest.mark.parametrize("off", ["false", "False", "0", ""])
def test_text_that_says_false_turns_nothing_on(off: str) -> None:
    names = ("enable_hierarchical_cache", "enable_eplb", "enable_deepep_moe", "enable_lmcache")
    plan = engine_arguments("0.5.9", planned={**dict.fromkeys(names, off), "disable_radix_cache": "true"})
    assert all(plan.arguments[name] is False for name in names)
    assert plan.command_line() == ["--disable-radix-cache", "--enable-return-routed-experts"]
    with pytest.raises(ReplayError, match="sglang#26975"):
        engine_arguments("0.5.9", planned={"enable_hierarchical_cache": "True"})
    with pytest.raises(ReplayError, match=r"--enable-eplb.*on or off.*got maybe"):
        engine_arguments("0.5.9", planned={"--enable-eplb": "maybe"})


def test_an_argument_by_each_of_its_names() -> None:
    planned = {"tp": 8, "--ep": 4, "--data-parallel-size": 2, "pipeline_parallel_size": 1}
    assert engine_arguments("0.5.23", planned=planned).arguments == {
        "tp_size": 8,
        "ep_size": 4,
        "dp_size": 2,
        "pp_size": 1,
        "enable_return_routed_experts": True,
    }
    assert engine_arguments("0.5.23", planned={"tp": 8, "tp_size": 8}).arguments["tp_size"] == 8
    with pytest.raises(ReplayError, match=r"tp_size.*planned twice.*8 and 4"):
        engine_arguments("0.5.23", planned={"tp": 8, "tp_size": 4})


@pytest.mark.parametrize("symptom", Symptom)
@pytest.mark.parametrize("version", ["", "0.5.6", "0.5.7", "0.5.9", "0.5.10", "0.5.12", "0.5.13", "0.5.23"])
def test_no_cause_is_named_twice(version: str, symptom: Symptom) -> None:
    cause = Source(engine="SGLang", version=version, faults=FAULTS).error(symptom, "").cause
    for words in (
        "sglang#26423",
        "the engine's own",
        "HiCache",
        "MoE runner",
        "another model",
        "decode node",
    ):
        assert cause.count(words) < 2, cause


@pytest.mark.parametrize(
    "version", ["", "main", "latest", "nightly", "0.1.dev1+g1a2b3c4", "0.5", "nightly-20260101", "0.0.0"]
)
def test_no_release_of_sglang(version: str) -> None:
    with pytest.raises(ReplayError, match="doesn't tell its release"):
        engine_arguments(version)
    with pytest.raises(ReplayError, match="doesn't tell its release"):
        request_arguments(version)


@pytest.mark.parametrize("version", [None, 5, (0, 5, 23)])
def test_a_version_that_is_no_text(version: Any) -> None:
    with pytest.raises(ReplayError, match="told as text"):
        engine_arguments(version)
    with pytest.raises(ReplayError, match="told as text"):
        request_arguments(version)
    if version is not None:
        asked = request("0.5.23")
        with pytest.raises(ReplayError, match="told as text"):
            decoded(asked.generate(), asked, version=version)


@pytest.mark.parametrize("version", ["main", "", "0.1.dev1+g1a2b3c4"])
def test_a_version_that_is_none_reads_as_unknown(version: str) -> None:
    asked = request("0.5.23", asked_from=7)
    assert_true(decoded(asked.generate(), asked, version=version, start_len=7), asked, 7)


def test_a_build_of_a_release_is_that_release() -> None:
    for version in ("0.5.23.dev12+g1a2b3c4", "v0.5.23", "0.5.23rc1"):
        assert request_arguments(version, start_len=3)["routed_experts_start_len"] == 3


def test_a_stale_row_from_a_cache_beyond_the_device_of_sglang_0_5_9() -> None:
    asked = request("0.5.9")
    asked.rows[5] = asked.rows[2]
    with pytest.raises(InvalidRoutes, match=r"another token's.*HiCache, sglang#26975"):
        decoded(asked.generate(), asked)


def test_ngram_leaves_the_output_zero_in_sglang_0_5_23() -> None:
    asked = request("0.5.23")
    asked.rows[PROMPT:] = 0
    with pytest.raises(InvalidRoutes, match=r"69 of 81 rows.*NGRAM.*sglang#37949"):
        decoded(asked.generate(), asked)
    routes = decoded(asked.generate(), asked, missing="native")
    assert routes.recorded.tolist() == [True] * PROMPT + [False] * OUTPUT


def test_a_pipeline_stage_that_was_never_captured_is_a_constant_layer() -> None:
    asked = request("0.5.23")
    asked.rows[:, 3:] = 0
    with pytest.raises(InvalidRoutes, match=r"layer 3.*pipeline parallelism"):
        decoded(asked.generate(), asked)


def test_layers_that_route_by_a_table_of_tokens_are_zeros_and_have_no_routes() -> None:
    asked = request("0.5.23")
    asked.rows[:, 1] = 0
    with pytest.raises(InvalidRoutes, match=r"layer 1.*RoutedModel\.hashed"):
        decoded(asked.generate(), asked)
    model = RoutedModel(layers=(2, 3, 4, 5), num_layers=6, num_experts=64, topk=4, hashed=(1,))
    routes = from_sglang(asked.generate(), model, prompt_token_ids=asked.prompt, version="0.5.23")
    np.testing.assert_array_equal(routes.ids[:-1].numpy(), asked.rows[:, 2:])


@pytest.mark.parametrize("version", ["0.5.23"])
def test_narrow_ids_on_the_wire_are_told_by_their_count(version: str) -> None:
    """sglang#31219 plans uint8; until then int32 is all there is."""
    asked = request(version)
    narrow = base64.b64encode(asked.rows.astype(np.uint8).tobytes()).decode()
    with pytest.raises(InvalidRoutes, match="can't be shaped"):
        decoded(with_payload(asked, narrow), asked)


# Where rows begin: T30


@pytest.mark.parametrize("version", RELEASES)
@pytest.mark.parametrize("start", [1, 5, PROMPT])
def test_T30_rows_from_a_start_of_sglang(version: str, start: int) -> None:
    """AReno #524: the second turn's rows begin after the first's, in the releases that honour the start and
    in those that send everything."""
    asked = request(version, asked_from=start)
    routes = decoded(asked.generate(), asked, start_len=start)
    assert_true(routes, asked, start)


@pytest.mark.parametrize("version", ["0.5.11", "0.5.13"])
def test_T30_a_start_is_told_by_the_count_where_the_release_isnt_known(version: str) -> None:
    asked = request(version, asked_from=7)
    assert_true(decoded(asked.generate(), asked, start_len=7, version=None), asked, 7)


@pytest.mark.parametrize("version", RELEASES)
def test_T30_a_start_that_the_request_didnt_carry(version: str) -> None:
    """All rows came, so those before the start are left out. None are taken for rows past the end."""
    for start in (1, 7, PROMPT):
        asked = request(version)
        assert_true(decoded(asked.generate(), asked, start_len=start), asked, start)


def test_T30_a_start_that_from_sglang_wasnt_told() -> None:
    for version in ("0.5.12", "0.5.23"):
        asked = request(version, asked_from=7)
        with pytest.raises(InvalidRoutes, match=r"81 rows.*got 74.*wasn't told"):
            decoded(asked.generate(), asked)


def test_T30_a_release_that_isnt_the_engines() -> None:
    asked = request("0.5.12", asked_from=7)
    with pytest.raises(InvalidRoutes, match=r"Expected 81 rows, from token 0 on.*got 74"):
        decoded(asked.generate(), asked, start_len=7, version="0.5.11")


def test_T30_a_start_and_rows_past_the_end_together() -> None:
    for version in ("0.5.11", "0.5.12"):
        for carried in (3, 0):
            asked = request(version, asked_from=carried, past=4, finish="stop", drafts=6)
            assert_true(decoded(asked.generate(), asked, start_len=3), asked, 3)


def test_T30_rows_that_may_begin_at_either_are_refused() -> None:
    """Three rows too many for those from token 3 on: they are before it, or past the end."""
    asked = request("0.5.12", asked_from=3, past=3, finish="stop", drafts=6)
    with pytest.raises(InvalidRoutes, match=r"first token or at start_len.*78 from token 3 on, or 81"):
        decoded(asked.generate(), asked, start_len=3)
    asked.version = "0.5.11"  # which sends all rows, always
    assert_true(decoded(asked.generate(), asked, start_len=3), asked, 3)


@pytest.mark.parametrize("version", RELEASES)
def test_T30_two_turns_make_one_sequence_of_sglang(version: str) -> None:
    first = request(version)
    turn = decoded(first.generate(), first)
    prompt = [*first.prompt, *first.output, 60_001, 60_002]  # a tool's answer
    tokens = len(prompt) + 9
    rows = np.concatenate([first.rows, true_rows(MODEL, tokens - 1 - len(first.rows), seed=1)])
    second = Request(version, prompt, list(range(70_000, 70_009)), rows, asked_from=len(first.rows))
    rest = decoded(second.generate(), second, start_len=len(first.rows))
    held = len(first.rows)
    joined = torch.cat([turn.ids[:held], rest.ids[held:]])
    np.testing.assert_array_equal(joined[:-1].numpy(), rows[:, 1:])
    assert bool(rest.recorded[held:-1].all())
    assert not bool(rest.recorded[:held].any())


@pytest.mark.parametrize("start", [-1, 83])
def test_a_start_outside_the_sequence(start: int) -> None:
    asked = request("0.5.23")
    with pytest.raises(InvalidRoutes, match="start_len isn't in the sequence"):
        decoded(asked.generate(), asked, start_len=start)


@pytest.mark.parametrize("start", [1.5, None, "3"])
def test_a_start_that_is_no_number(start: Any) -> None:
    asked = request("0.5.23")
    with pytest.raises(ReplayError, match="from_sglang: start_len must be a whole number"):
        decoded(asked.generate(), asked, start_len=start)


def test_a_start_may_be_numpys() -> None:
    asked = request("0.5.23", asked_from=3)
    start: Any = np.int64(3)
    assert decoded(asked.generate(), asked, start_len=start) == decoded(asked.generate(), asked, start_len=3)


@pytest.mark.parametrize("start", [81, 82])
def test_a_start_at_the_end_has_no_rows(start: int) -> None:
    asked = request("0.5.23", asked_from=start)
    assert decoded(asked.generate(), asked, start_len=start).recorded.tolist() == [False] * 82


def test_a_request_cant_start_before_the_prompt() -> None:
    with pytest.raises(ReplayError, match="before the prompt"):
        request_arguments("0.5.23", start_len=-1)


# How a request ends


@pytest.mark.parametrize("version", RELEASES)
def test_an_aborted_request_of_sglang(version: str) -> None:
    """Running, it has its rows so far; in the queue, none."""
    asked = request(version, finish="abort")
    assert_true(decoded(asked.generate(), asked), asked)
    asked = request(version, finish="abort", captured=False)
    routes = decoded(asked.generate(), asked)
    assert len(routes) == PROMPT + OUTPUT
    assert not bool(routes.recorded.any())
    queued = request(version, output=0)
    routes = decoded(queued.aborted_in_the_queue(), queued)
    assert routes.recorded.tolist() == [False] * PROMPT


@pytest.mark.parametrize("version", [*RELEASES, None])
def test_an_aborted_request_has_all_its_rows_or_none(version: str | None) -> None:
    """Fewer are another request's, or begin at a start that nobody told."""
    asked = request("0.5.23", finish="abort")
    for rows in (asked.rows[10:], asked.rows[:40], asked.rows[:1]):
        with pytest.raises(InvalidRoutes, match=r"rows for other tokens.*81 rows"):
            decoded(with_payload(asked, text_of(rows)), asked, version=version)
    for nothing in ("", None, []):
        routes = decoded(with_payload(asked, nothing), asked, version=version, start_len=3)
        assert routes.recorded.tolist() == [False] * 82


def test_a_request_that_ended_has_all_rows_or_is_refused() -> None:
    asked = request("0.5.23")
    with pytest.raises(InvalidRoutes, match=r"81 rows.*got 40"):
        decoded(with_payload(asked, text_of(asked.rows[:40])), asked)
    for nothing in (None, []):
        with pytest.raises(InvalidRoutes, match=r"no routes in the answer.*return_routed_experts=True"):
            decoded(with_payload(asked, nothing), asked)


def test_a_stop_strings_tokens_may_be_taken_away() -> None:
    asked = request("0.5.23", finish="stop")
    trimmed = replace(asked, output=asked.output[:-3])
    for answer in (asked.generate(), asked.meta_info(), asked.openai()):
        assert_true(decoded(answer, trimmed), trimmed)


def test_tokens_are_taken_away_only_at_a_stop_or_where_the_answer_shows_them() -> None:
    asked = request("0.5.23", finish="length")
    trimmed = replace(asked, output=asked.output[:-3])
    assert_true(decoded(asked.generate(), trimmed), trimmed)
    with pytest.raises(InvalidRoutes, match=r"output_ids aren't the tokens.*Expected 70, got 67"):
        decoded(asked.meta_info(), trimmed)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda one: replace(one, prompt=[*one.prompt, 1]), "prompt_token_ids"),
        (lambda one: replace(one, prompt=one.prompt[1:]), "prompt_token_ids"),
        (lambda one: replace(one, output=[*one.output, 1]), "output_ids"),
        (lambda one: replace(one, output=[1, *one.output[1:]]), "output_ids"),
        (lambda one: replace(one, output=one.output[1:]), "output_ids"),
        (lambda one: replace(one, output=one.output[:2]), "output_ids"),
    ],
    ids=["longer prompt", "shorter prompt", "longer", "another token", "first token gone", "far too short"],
)
def test_text_that_was_tokenised_again_is_caught(change: Any, name: str) -> None:
    asked = request("0.5.23")
    with pytest.raises(InvalidRoutes, match=rf"request 3f9d: {name} aren't the tokens.*tokenised again"):
        decoded(asked.generate(), change(asked))


@pytest.mark.parametrize("place", ["answer", "sglext"])
def test_a_prompt_of_as_many_other_tokens_is_caught_where_the_answer_repeats_it(place: str) -> None:
    """A chat prompt that the caller tokenised too: the routes would be those of tokens that never ran."""
    asked = request("0.5.23")
    answer = asked.generate() | {"prompt_token_ids": list(asked.prompt)}
    if place == "sglext":
        answer = asked.openai("chat.completion")
        answer["sglext"] = answer["sglext"] | {"input_ids": list(asked.prompt)}
    assert len(decoded(answer, asked)) == len(asked.prompt) + len(asked.output)
    with pytest.raises(InvalidRoutes, match=r"prompt_token_ids aren't the tokens.*those of the answer"):
        decoded(answer, replace(asked, prompt=[1, *asked.prompt[1:]]))


@pytest.mark.parametrize("version", WITH_SGLEXT)
@pytest.mark.parametrize("kind", ["chat.completion", "text_completion"])
def test_a_prompt_that_lacks_the_engines_first_token(version: str, kind: str) -> None:
    """Its BOS: each row would be the token's before it."""
    asked = request(version, finish="stop")
    shorter = replace(asked, prompt=asked.prompt[1:])
    for output in (asked.output, [*asked.output, 1], asked.output[:-1]):
        with pytest.raises(
            InvalidRoutes, match=r"prompt_token_ids aren't the tokens.*Expected 12, got 11.*BOS"
        ):
            decoded(asked.openai(kind), replace(shorter, output=output))
    with pytest.raises(InvalidRoutes, match=r"rows for other tokens.*Expected 80 rows.*got 81"):
        decoded({"sglext": asked.openai()["sglext"]}, shorter)


def test_a_usage_that_leaves_the_stub_of_a_kimi_k3_chat_out() -> None:
    """From 0.5.17 on it says three fewer than ran."""
    asked = request("0.5.17")
    body = asked.openai()
    body["usage"]["prompt_tokens"] -= 3
    assert_true(decoded(body, asked), asked)
    with pytest.raises(InvalidRoutes, match=r"Expected 9, got 12"):
        decoded({**body, "object": "text_completion"}, asked)
    with pytest.raises(InvalidRoutes, match=r"rows for other tokens"):
        decoded(asked.openai(), replace(asked, prompt=[1, 2, 3, *asked.prompt]))


def test_a_usage_of_a_request_that_never_ran() -> None:
    queued = request("0.5.23", output=0, finish="abort", captured=False)
    body = queued.openai()
    body["usage"]["prompt_tokens"] = 0
    assert not bool(decoded(body, queued).recorded.any())


def test_the_last_chunk_of_a_stream_holds_its_own_tokens_only() -> None:
    asked = request("0.5.23")
    chunk = {**asked.generate(), "output_ids": asked.output[-1:]}
    assert_true(decoded(chunk, asked), asked)
    with pytest.raises(InvalidRoutes, match=r"Expected 70, got 1.*one chunk of a stream"):
        from_sglang(chunk, MODEL, prompt_token_ids=asked.prompt)


@pytest.mark.parametrize("version", WITH_SGLEXT)
def test_the_chunk_of_an_openai_stream_that_has_the_routes_of_sglang(version: str) -> None:
    """It comes after those of the choices, and has none."""
    asked = request(version)
    chunk = {"id": asked.id, "object": "chat.completion.chunk", "choices": [], "usage": None}
    assert_true(decoded({**chunk, "sglext": asked.openai()["sglext"]}, asked), asked)


# Weights, and T29


@pytest.mark.parametrize("version", RELEASES)
def test_the_weights_of_sglang(version: str) -> None:
    asked = request(version, weights=[("step-7", 0)])
    assert decoded(asked.generate(), asked).weight_version == "step-7"
    assert decoded(asked.meta_info(), asked, weight_version=8).weight_version == 8
    unnamed = request(version)
    assert decoded(unnamed.generate(), unnamed).weight_version is None
    if version in WITH_SGLEXT:
        assert decoded(asked.openai(), asked).weight_version == "step-7"


@pytest.mark.parametrize("version", ["0.5.19", "0.5.23"])
def test_weights_that_changed_in_place_are_no_one_version(version: str) -> None:
    asked = request(version, weights=[("7", 0), ("8", 30)])
    routes = decoded(asked.generate(), asked)
    assert_true(routes, asked)
    assert routes.weight_version is None


@pytest.mark.parametrize("version", ["0.5.19", "0.5.23"])
def test_T29_routes_that_were_computed_again_arent_paired_with_old_log_probs(version: str) -> None:
    """miles #3277: a request retracted over a weight update keeps its log-probs, not its routes."""
    asked = request(version, weights=[("7", 0), ("8", 30)], retractions=1)
    with pytest.raises(
        InvalidRoutes, match=r"retracted 1 times.*first 30 output tokens.*weights 7 for tokens 0"
    ):
        decoded(asked.generate(), asked)
    routes = decoded(asked.generate(), asked, missing="native")
    sampled_by_7 = range(PROMPT - 1, PROMPT - 1 + 30)
    assert routes.recorded.tolist() == [row not in sampled_by_7 and row < 81 for row in range(82)]
    kept = routes.recorded.numpy()
    np.testing.assert_array_equal(routes.ids.numpy()[kept], asked.rows[kept[:-1]][:, 1:])
    assert routes.fingerprint == fingerprint([*asked.prompt, *asked.output])


@pytest.mark.parametrize(
    "edges",
    [[(0, 5), (-5, 70)], [(-1, 70)], [(0, 40), (30, 70)], [(30, 70), (0, 30)], [(0, 70), (0, 70)], [(9, 8)]],
    ids=str,
)
@pytest.mark.parametrize("missing", ["error", "native"])
def test_T29_spans_of_weights_that_cant_be(edges: list[tuple[int, int]], missing: str) -> None:
    """A start before the output, taken at its word, would leave other rows without a route than it means."""
    asked = request("0.5.23", retractions=1)
    info = asked.meta_info()
    info["weight_versions"] = [
        {"version": str(number), "start": start, "end": end} for number, (start, end) in enumerate(edges)
    ]
    for answer in (info, {**asked.openai(), "metadata": {"weight_versions": info["weight_versions"]}}):
        with pytest.raises(
            InvalidRoutes, match=r"weight_versions isn't a list of spans, one after the other"
        ):
            decoded(answer, asked, missing=missing)


@pytest.mark.parametrize("edges", [[(0, 30), (30, 70)], [(0, 0), (0, 70)], [(0, 30), (31, 70)]], ids=str)
def test_T29_spans_of_weights_one_after_the_other(edges: list[tuple[int, int]]) -> None:
    asked = request("0.5.23")
    info = asked.meta_info()
    info["weight_versions"] = [
        {"version": str(number), "start": start, "end": end} for number, (start, end) in enumerate(edges)
    ]
    assert_true(decoded(info, asked), asked)


def test_T29_a_retraction_under_one_weights_is_no_fault() -> None:
    asked = request("0.5.23", weights=[("7", 0)], retractions=3)
    assert_true(decoded(asked.generate(), asked), asked)


@pytest.mark.parametrize("version", ["0.5.7", "0.5.11", "0.5.12", "0.5.18"])
def test_T29_a_release_that_cant_say_so_is_warned_of_once(version: str, caplog: Any) -> None:
    asked = request(version, retractions=2, weights=[("8", 0)])
    decode._warn_of_retractions.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert_true(decoded(asked.generate(), asked), asked)
    assert [f"SGLang {version} retracted" in record.getMessage() for record in caplog.records] == [True]


# The other bugs of the list


@pytest.fixture
def read_only_is_an_error() -> Iterator[None]:
    """torch says once a process that it was given an array that can't be written, and goes on."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="not writable"):
                torch.from_numpy(np.frombuffer(b"1234", np.int32))
            yield
    finally:
        torch.set_warn_always(before)


@pytest.mark.usefixtures("read_only_is_an_error")
@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int16])
def test_T10_read_only_ids_become_routes_that_can_be_written(dtype: type) -> None:
    """verl #5519: what is decoded from text is read-only, and torch warns or crashes."""
    asked = request("0.5.23")
    rows = asked.rows.astype(dtype)
    payload = np.frombuffer(rows.tobytes(), dtype).reshape(rows.shape)
    assert not payload.flags.writeable
    for found in (payload, payload[:, 1:], payload.reshape(-1), text_of(rows), asked.rows.tobytes()):
        routes = decoded(with_payload(asked, found), asked)
        assert_true(routes, asked)
        routes.ids.zero_()
        np.testing.assert_array_equal(payload, rows)


def test_T10_routes_share_no_memory_with_the_answer() -> None:
    asked = request("0.5.9")
    answer = asked.generate(skip_tokenizer_init=True)
    routes = decoded(answer, asked)
    answer["meta_info"]["routed_experts"].zero_()
    assert_true(routes, asked)


@pytest.mark.parametrize("version", ["0.5.10", "0.5.15", "0.5.23"])
def test_T31_a_row_repeated_at_the_edge_of_a_chunk(version: str) -> None:
    """sglang #36404: padded rows hold one row of an earlier pass, and come back as a run of it."""
    asked = request(version, prompt=40, output=60)
    asked.rows[32:40] = true_rows(MODEL, 1, seed=9)
    with pytest.raises(InvalidRoutes, match=r"7 rows are another token's.*first is row 33.*sglang#36404"):
        decoded(asked.generate(), asked)


def test_T31_rows_that_a_build_marks_as_padded() -> None:
    asked = request("0.5.23")
    asked.rows[20:24, 1:] = -1
    with pytest.raises(InvalidRoutes, match=r"out of range.*got -1.*sglang#36404"):
        decoded(asked.generate(), asked)


@pytest.mark.parametrize("version", RELEASES)
def test_T32_zeros_are_never_routes_of_sglang(version: str) -> None:
    """vllm #33013 and its like: a capturer that was bound too late, or not at all."""
    asked = request(version)
    with pytest.raises(InvalidRoutes, match=r"all 81 rows are zeros.*Usual cause"):
        decoded(with_payload(asked, text_of(np.zeros_like(asked.rows))), asked)


@pytest.mark.parametrize("version", ["0.5.9", "0.5.23"])
def test_T32_zeros_of_a_top_1_model_are_called_so(version: str) -> None:
    """Llama 4 and its like: expert 0 in all of 24 layers is no choice, and no row of another token's."""
    model = RoutedModel(layers=tuple(range(24)), num_layers=24, num_experts=128, topk=1)
    asked = replace(request(version), rows=true_rows(model, 81))

    def read(rows: Array, **options: Any) -> RoutedExperts:
        answer = with_payload(asked, text_of(rows))
        return from_sglang(answer, model, prompt_token_ids=asked.prompt, version=version, **options)

    with pytest.raises(InvalidRoutes, match=r"all 81 rows are zeros.*routes inside its kernel"):
        read(np.zeros_like(asked.rows))
    asked.rows[PROMPT:] = 0
    with pytest.raises(InvalidRoutes, match=r"69 of 81 rows are zeros in all layers.*NGRAM"):
        read(asked.rows)
    assert read(asked.rows, missing="native").recorded.tolist() == [True] * PROMPT + [False] * OUTPUT


@pytest.mark.parametrize("version", WITH_SGLEXT)
def test_T37_the_routes_neednt_stay_in_the_answer_of_sglang(version: str) -> None:
    """prime-rl #2813: a route field in a chat answer breaks who reads it. It can be taken out first."""
    asked = request(version)
    body = asked.openai()
    kept = {"sglext": body.pop("sglext")}
    assert "routed_experts" not in json.dumps(body)
    assert_true(decoded(kept, asked), asked)


@pytest.mark.parametrize("version", WITH_SGLEXT)
def test_T37_an_answer_is_left_as_it_was_of_sglang(version: str) -> None:
    asked = request(version)
    for answer in (asked.openai(), asked.generate(), asked.meta_info()):
        before = copy.deepcopy(answer)
        decoded(answer, asked)
        assert answer == before


# Somebody else's data


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        ("%%%%", "isn't base64"),
        ("QUJD\nQUJD", "isn't base64"),
        ("QUJDR", "isn't base64"),
        ("é" * 8, "isn't base64"),
        (base64.b64encode(b"12345").decode(), "aren't int32"),
        (b"\x01\x00\x00\x00\x02", "aren't int32"),
        (1.5, "aren't expert ids"),
        (7, "aren't expert ids"),
        ({"a": 1}, "aren't expert ids"),
        ([[[1, 2]]], "aren't expert ids"),
        (torch.zeros(81, 6, 4), r"aren't expert ids.*float32"),
        (torch.zeros(81, 6, 4, dtype=torch.bfloat16), r"aren't expert ids.*torch\.bfloat16"),
        (torch.zeros(81, 6, 4, dtype=torch.int32).to_sparse(), r"aren't expert ids.*torch\.int32"),
        (torch.zeros(81, 6, 4, dtype=torch.bool), r"aren't expert ids.*bool"),
        (np.zeros((81, 6, 4)), r"aren't expert ids.*float64"),
        (np.array(["a"]), "aren't expert ids"),
        (np.array([None]), "aren't expert ids"),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_payload_of_something_else(payload: Any, problem: str) -> None:
    asked = request("0.5.23")
    where = r"SGLang 0\.5\.23, request 3f9d, meta_info\.routed_experts"
    with pytest.raises(InvalidRoutes, match=rf"{where}: .*{problem}"):
        decoded(with_payload(asked, payload), asked)


@pytest.mark.parametrize(
    ("layers", "topk", "fits"),
    [
        (7, 4, "7 layers with top-4"),
        (5, 4, "the 5 MoE layers alone"),
        (6, 8, r"12 layers with top-4 or top-8 in 6 layers"),
        (6, 2, "3 layers with top-4 or top-2 in 6 layers"),
        (3, 5, "fits 15 ids a token"),
    ],
)
def test_another_model_is_named_by_what_fits(layers: int, topk: int, fits: str) -> None:
    asked = request("0.5.23")
    payload = text_of(np.ones((81, layers, topk)))
    with pytest.raises(InvalidRoutes, match=rf"shaped.*81 rows of 6 layers with top-4.*{fits}"):
        decoded(with_payload(asked, payload), asked)


def test_one_id_too_few() -> None:
    asked = request("0.5.23")
    with pytest.raises(InvalidRoutes, match=r"1943 ids can't be shaped.*Expected 1944.*no model"):
        decoded(with_payload(asked, text_of(asked.rows.reshape(-1)[:-1])), asked)


@pytest.mark.parametrize("shape", [(81, 6, 3), (81, 4, 4), (81, 24, 1)])
def test_a_shaped_array_of_another_model(shape: tuple[int, ...]) -> None:
    asked = request("0.5.23")
    with pytest.raises(InvalidRoutes, match=r"top-k isn't the model's|columns are neither"):
        decoded(with_payload(asked, np.ones(shape, np.int32)), asked)


@pytest.mark.parametrize(("rows", "words"), [(80, "got 80"), (82, "got 82"), (0, "got 0")])
@pytest.mark.parametrize("form", [np.asarray, torch.from_numpy])
def test_a_shaped_array_of_other_tokens(form: Any, rows: int, words: str) -> None:
    asked = request("0.5.23", past=1)
    with pytest.raises(InvalidRoutes, match=rf"rows for other tokens.*Expected 81 rows.*{words}"):
        decoded(with_payload(asked, form(asked.rows[:rows])), asked)


def test_bytes_that_begin_with_a_mark_are_no_text() -> None:
    asked = request("0.5.23")
    asked.rows[0] = -1
    with pytest.raises(InvalidRoutes, match=r"dense layer has experts.*\[-1, -1, -1, -1\]"):
        decoded(with_payload(asked, asked.rows.tobytes()), asked)


@pytest.mark.parametrize("length", [40_000, 40_001, 2**20])
@pytest.mark.parametrize("kind", [str, bytes])
def test_text_far_too_long_is_refused_before_it_is_decoded(
    length: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request("0.5.7")
    monkeypatch.setattr("binascii.a2b_base64", lambda *_, **__: pytest.fail("decoded"))
    text = "A" * length if kind is str else b"A" * length
    with pytest.raises(InvalidRoutes, match=r"more text than|can't be shaped|rows for other tokens"):
        decoded(with_payload(asked, text), asked)


def test_a_count_in_the_answer_cant_make_room_for_text() -> None:
    asked = request("0.5.23", finish="stop")
    info = {**asked.meta_info(), "completion_tokens": 10**12, "routed_experts": "A" * 40_000}
    with pytest.raises(InvalidRoutes, match="aren't the tokens that the engine counted"):
        decoded(info, asked)


@pytest.mark.parametrize(
    "found",
    [
        None,
        [],
        [{}],
        "text",
        b"data: {}",
        "[" * 100_000,
        "null",
        7,
        {"meta_info": []},
        {"choices": 3},
        {"choices": ["a"]},
        {"sglext": "a"},
        {"choices": [], "usage": []},
        {"meta_info": {"weight_versions": [{}]}},
        {"meta_info": {"weight_versions": 3}},
        {"meta_info": {"weight_versions": [np.array(1)]}},
        {"choices": [], "object": np.array([])},
        {"meta_info": {}, "output_ids": "abc"},
        {"meta_info": {}, "output_ids": [[1]]},
        {"meta_info": {}, "output_ids": [1.5]},
        {"meta_info": {}, "prompt_token_ids": [None]},
    ],
    ids=lambda found: repr(found)[:40],
)
def test_an_answer_of_something_else(found: Any) -> None:
    with pytest.raises(InvalidRoutes, match=r"\[npu_replay\] SGLang.*Expected"):
        from_sglang(found, MODEL, prompt_token_ids=[1], output_ids=[2])


@pytest.mark.parametrize("count", [-1, "12", 1.0, True, [], 1.5])
@pytest.mark.parametrize("key", ["prompt_tokens", "completion_tokens", "num_retractions"])
def test_a_count_of_something_else(key: str, count: Any) -> None:
    asked = request("0.5.23")
    with pytest.raises(InvalidRoutes, match=rf"{key} is no count"):
        decoded({**asked.meta_info(), key: count}, asked)


def test_a_dict_of_something_else_has_no_routes() -> None:
    with pytest.raises(InvalidRoutes, match="no routes in the answer"):
        from_sglang({"loss": 1.5}, MODEL, prompt_token_ids=[1], output_ids=[2, 3])


@pytest.mark.parametrize(
    "ids", [[1.5], "abc", [[1, 2]], {"a": 1}, [None], torch.ones(2), [2**70], torch.ones(2).to_sparse()]
)
@pytest.mark.parametrize("name", ["prompt_token_ids", "output_ids"])
def test_token_ids_of_something_else(ids: Any, name: str) -> None:
    asked = request("0.5.23")
    with pytest.raises(InvalidRoutes, match=rf"{name}: these aren't token ids"):
        decoded(asked.generate(), asked, **{name: ids})


def test_token_ids_in_any_array() -> None:
    asked = request("0.5.23")
    routes = decoded(
        asked.generate(),
        asked,
        prompt_token_ids=torch.tensor(asked.prompt, dtype=torch.int32),
        output_ids=np.array(asked.output, dtype=np.uint16),
    )
    assert_true(routes, asked)


def test_tokens_that_nobody_gives() -> None:
    asked = request("0.5.23")
    with pytest.raises(InvalidRoutes, match="give prompt_token_ids"):
        from_sglang(asked.generate(), MODEL)
    with pytest.raises(InvalidRoutes, match="give output_ids"):
        from_sglang(asked.meta_info(), MODEL, prompt_token_ids=asked.prompt)


def test_the_engines_own_ids_are_found_in_an_openai_answer() -> None:
    asked = request("0.5.23")
    assert_true(from_sglang(asked.openai("text_completion", token_ids=True), MODEL), asked)
    body = asked.openai()
    body["sglext"] |= {"input_ids": asked.prompt, "output_ids": [asked.output]}
    assert_true(from_sglang(body, MODEL), asked)


def test_a_model_that_says_too_little() -> None:
    asked = request("0.5.23")
    with pytest.raises(ReplayError, match="doesn't say"):
        from_sglang(asked.generate(), {"hidden_size": 8}, prompt_token_ids=asked.prompt)


ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=40),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    *(
                        "meta_info",
                        "routed_experts",
                        "output_ids",
                        "prompt_token_ids",
                        "choices",
                        "sglext",
                        "usage",
                    ),
                    *(
                        "finish_reason",
                        "type",
                        "prompt_tokens",
                        "completion_tokens",
                        "weight_versions",
                        "version",
                    ),
                    *("num_retractions", "metadata", "id", "start", "end", "input_ids"),
                ]
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(found=ANYTHING, start=st.integers(-1, 6))
def test_no_answer_makes_it_crash(found: Any, start: int) -> None:
    model = RoutedModel(layers=(1,), num_layers=2, num_experts=4, topk=2)
    try:
        routes = from_sglang(found, model, prompt_token_ids=[5, 6], output_ids=[7], start_len=start)
    except InvalidRoutes as error:
        assert "[npu_replay]" in str(error)  # noqa: PT017
    else:
        assert len(routes) == 3


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    payload=st.binary(max_size=120), text=st.booleans(), version=st.sampled_from([None, "0.5.11", "0.5.23"])
)
def test_no_payload_makes_it_crash(payload: bytes, text: bool, version: str | None) -> None:
    model = RoutedModel(layers=(1,), num_layers=2, num_experts=4, topk=2)
    found = {"routed_experts": base64.b64encode(payload).decode() if text else payload}
    try:
        routes = from_sglang(found, model, prompt_token_ids=[5, 6], output_ids=[7, 8], version=version)
    except InvalidRoutes:
        return
    assert RoutedExperts.from_bytes(routes.to_bytes()) == routes
