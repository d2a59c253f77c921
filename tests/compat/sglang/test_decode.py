"""What SGLang's decoder does alone. What every engine's does: tests/rollout/test_engine_contract.py."""

from __future__ import annotations

import base64
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jobs
from npu_replay import fingerprint
from npu_replay.compat.sglang import decode
from npu_replay.compat.sglang.decode import from_sglang
from npu_replay.compat.sglang.engine_plan import engine_arguments, request_arguments
from npu_replay.errors import InvalidRoutes, ReplayError
from npu_replay.rollout.model_config import RoutedModel
from npu_replay.rollout.release_rules import release
from npu_replay.routes.checks import Array
from npu_replay.routes.routed_experts import RoutedExperts
from sglang_outputs import Request, true_rows

MODEL = RoutedModel(layers=(1, 2, 3, 4, 5), num_layers=6, num_experts=64, topk=4)
PROMPT = 12
OUTPUT = 70
ON = "enable_return_routed_experts"
WIDTH = "speculative_eagle_topk"
STEPS = "speculative_num_steps"
DRAFTED = "speculative_num_draft_tokens"


def request(
    version: str, *, prompt: int = PROMPT, output: int = OUTPUT, past: int = 0, **about: Any
) -> Request:
    """A request of random tokens; `past` tokens were run behind its end."""
    tokens = np.random.default_rng(7).permutation(50_000)[: prompt + output].tolist()
    rows = true_rows(MODEL, prompt + output - 1 + past)
    return Request(version, tokens[:prompt], tokens[prompt:], rows, **about)


def decoded(answer: Any, asked: Request, **options: Any) -> RoutedExperts:
    arguments = {"prompt_token_ids": asked.prompt, "output_ids": asked.output, "version": asked.version}
    return from_sglang(answer, MODEL, **{**arguments, **options})


def refused(words: str) -> Any:
    return pytest.raises(InvalidRoutes, match=words)


def assert_true(routes: RoutedExperts, asked: Request, start: int = 0, last: int = 1) -> None:
    """`last` tokens never ran: none did where the caller took some off the end."""
    tokens = len(asked.prompt) + len(asked.output)
    assert (len(routes), routes.layers, routes.num_experts) == (tokens, MODEL.layers, MODEL.num_experts)
    assert routes.recorded.tolist() == [start <= row < tokens - last for row in range(tokens)]
    truth = asked.rows[start : tokens - last, 1:]
    np.testing.assert_array_equal(routes.ids[start : tokens - last].numpy(), truth)
    assert routes.fingerprint == fingerprint([*asked.prompt, *asked.output])


def with_rows(asked: Request, rows: Array) -> dict[str, Any]:
    text = base64.b64encode(np.ascontiguousarray(rows, dtype=np.int32).tobytes()).decode()
    return {"meta_info": asked.meta_info() | {"routed_experts": text}}


# What is wrong with rows, and the fault of that release that does it


def put(value: Any, *place: Any) -> Any:
    """Write `value` there, in an array of rows."""
    return lambda rows: rows.__setitem__(place, value)


PLACES = put(64, 0, 5, 0)  # a place beyond the experts
ZEROS = put(0, ...)
LATE = put(0, slice(PROMPT, None))
# fmt: off
WRONG_ROWS = {
    "T32 ids of places under EPLB": ("0.5.8", put(70, 3, 2, 1), r"out of range.*70.*on CUDA EPLB.*0\.5\.10"),
    "0.5.9 ids of places on an NPU": ("0.5.9", PLACES, "EPLB was on"),
    "0.5.22 ids of places": ("0.5.22", PLACES, r"on an NPU EPLB was on.*fixed in 0\.5\.23"),
    "0.5.23 ids out of range": ("0.5.23", PLACES, "another model than the engine's"),
    "0.5.8 zeros": ("0.5.8", ZEROS, r"rows are zeros.*NPU.*fixed in 0\.5\.9"),
    "another rank's share": ("0.5.11", put(0, slice(4, 9)), r"5 of 81 rows.*DeepEP"),
    "a draft in layer 0": ("0.5.14", put([3, 1, 4, 2], slice(None), 0),
        "layer 0: a dense layer.*draft model"),
    "a tier of cache": ("0.5.9", lambda rows: put(rows[2], slice(5, 10))(rows),
        "5 rows are another token's.*HiCache, sglang#26975"),
    "NGRAM": ("0.5.23", LATE, r"69 of 81 rows.*NGRAM.*sglang#37949"),
    "a pipeline stage": ("0.5.23", put(0, slice(None), slice(3, None)), r"layer 3.*pipeline parallelism"),
    "a table of tokens": ("0.5.23", put(0, slice(None), 1), r"layer 1.*RoutedModel\.hashed"),
    "T31 rows marked as padded": (*("0.5.23", put(-1, slice(20, 24), slice(1, None))),
        r"4 of 81 rows are -1 in all layers.*sglang#36404"),
}
# fmt: on


@pytest.mark.parametrize(("version", "change", "words"), WRONG_ROWS.values(), ids=WRONG_ROWS)
def test_wrong_rows_of_sglang_name_their_fault(version: str, change: Any, words: str) -> None:
    """vllm #33013 and its like: a capturer that was bound too late, or not at all; ids of places; drafts."""
    asked = request(version)
    change(asked.rows)
    with refused(words):
        decoded(asked.generate(), asked)


# What a server is started with, and what each request carries


def test_answers_of_a_release_before_the_oldest_that_is_checked_are_decoded() -> None:
    asked = request("0.5.7")
    np.testing.assert_array_equal(decoded(asked.generate(), asked).ids[:-1].numpy(), asked.rows[:, 1:])
    info = asked.meta_info() | {"routed_experts": None}
    with refused(r"SGLang 0\.5\.6.*no routes.*a release that nobody checks"):
        decoded(info, asked, version="0.5.6")


EPLB: dict[str, Any] = {"enable_eplb": True}
CROWDED: dict[str, Any] = {
    "enable_dp_attention": True,
    "dp_size": 4,
    "max_running_requests": 8192,
    "chunked_prefill_size": 4096,
}
SPREAD: dict[str, Any] = {"enable_dp_attention": True, "dp_size": 2}
DRAFTS = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}
FP4 = {"moe_runner_backend": "flashinfer_cutlass", "ep_size": 2}
ALWAYS = ("0.5.8", "0.5.23")
# fmt: off
NO_PLANS: list[tuple[str | tuple[str, ...], dict[str, Any], str]] = [
    (ALWAYS, {"pp_size": 2}, "one pipeline stage"),
    (ALWAYS, {"enable_hierarchical_cache": True}, "sglang#26975"),
    (ALWAYS, {"enable_lmcache": True}, "another sequence's routes"),
    (ALWAYS, {"disaggregation_mode": "decode"}, "rows of the prompt"),
    (ALWAYS, {"speculative_algorithm": "NGRAM"}, "sglang#37949"),
    (ALWAYS, {"speculative_algorithm": "DSPARK"}, "nothing of the output"),
    (ALWAYS, {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 4}, "permuted"),
    (ALWAYS, {"moe_runner_backend": "flashinfer_trtllm"}, "inside its kernel"),
    (ALWAYS, {"chunked_prefill_size": -1}, "sglang#26860"),
    (ALWAYS, {"enable_two_batch_overlap": True}, r"two half batches.*sglang#4068"),
    *((ALWAYS, plan, r"context-parallel ranks.*sglang#18233") for plan in ({"tp_size": 4, "attn_cp_size": 2},
        {"enable_prefill_context_parallel": True}, {"enable_prefill_cp": True, "attn_cp_size": 1})),
    ("0.5.23", {"attention_context_parallel_size": 2}, "its Python name: attn_cp_size"),
    ("0.5.9", EPLB, "ids of places"),
    *(("0.5.9", plan, "ids of places") for plan in ({"ep_num_redundant_experts": 16},
        {"init_expert_location": "places.json"}, {"ep_dispatch_algorithm": "static"})),
    (("0.5.10", "0.5.22"), {**EPLB, "device": "npu"},
        r"on an NPU.*can't be seen.*0\.5\.23"),
    ("0.5.8", {"device": "npu"}, "zeros on an NPU"),
    ("0.5.11", {"moe_a2a_backend": "deepep"}, r"own share.*0\.5\.12"),
    *((("0.5.12", "0.5.23"), {"moe_a2a_backend": name}, r"own share.*deepep alone")
      for name in ("ascend_fuseep", "mooncake")),
    ("0.5.14", {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1},
        r"layer 0 of the model.*0\.5\.15"),
    ("0.5.17", {"speculative_algorithm": "DFLASH"}, r"before 0\.5\.18"),
    ("0.5.12", CROWDED, "sglang#26123"),
    (("0.5.15", "0.5.23"), SPREAD | DRAFTS, "drafts give each request several rows"),
    ("0.5.23", {"attn_dp_size": 2} | DRAFTS, "drafts give each request several rows"),
    *((("0.5.10", "0.5.23"), SPREAD | FP4 | more, "each rank routes its own tokens")
      for more in ({}, {"quantization": "modelopt_fp4"})),
    ("0.5.9", {"enable_eplb": "true"}, "ids of places, not of experts"),
    ("0.5.9", {"--enable-eplb": True}, "its Python name: enable_eplb, got '--enable-eplb'"),
    *(("0.5.23", {name: 2}, "its Python name: pp_size") for name in ("--pp", "pipeline_parallel_size")),
]
# fmt: on


@pytest.mark.parametrize(
    ("version", "planned", "why"),
    [
        (version, planned, why)
        for versions, planned, why in NO_PLANS
        for version in ((versions,) if isinstance(versions, str) else versions)
    ],
)
def test_plans_that_sglang_cant_do(version: str, planned: dict[str, Any], why: str) -> None:
    plans: list[dict[str, Any]] = [{"planned": planned}]
    if planned.get("device") == "npu":
        plans.append({"planned": planned | {"device": None}, "device": "npu"})
    for plan in plans:
        with pytest.raises(ReplayError, match=why):
            engine_arguments(version, **plan)


@pytest.mark.parametrize(
    ("version", "planned", "device"),
    [
        ("0.5.9", {}, "npu"),
        ("0.5.9", {"init_expert_location": "trivial", "enable_eplb": False}, "cuda"),
        ("0.5.10", EPLB, "cuda"),
        ("0.5.23", EPLB, "npu"),
        ("0.5.11", {"moe_a2a_backend": "none"}, "cuda"),
        ("0.5.12", {"moe_a2a_backend": "deepep"}, "cuda"),
        ("0.5.23", {"moe_a2a_backend": "none"}, "npu"),
        ("0.5.15", {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}, "cuda"),
        ("0.5.18", {"speculative_algorithm": "DFLASH"}, "cuda"),
        ("0.5.13", CROWDED, "cuda"),
        ("0.5.12", {**CROWDED, "max_running_requests": 2048}, "cuda"),
        ("0.5.23", SPREAD | DRAFTS | {"disable_cuda_graph": True}, "cuda"),
        ("0.5.23", SPREAD | DRAFTS | {"cuda_graph_backend_decode": "disabled"}, "cuda"),
        ("0.5.23", SPREAD | DRAFTS | {"cuda_graph_config": {"decode": {"backend": "disabled"}}}, "cuda"),
        ("0.5.23", SPREAD | DRAFTS | {"moe_a2a_backend": "deepep"}, "cuda"),
        ("0.5.23", SPREAD | FP4 | {"moe_a2a_backend": "deepep"}, "cuda"),
        ("0.5.23", SPREAD | FP4 | {"disable_flashinfer_cutlass_moe_fp4_allgather": True}, "cuda"),
        ("0.5.23", SPREAD | FP4 | {"quantization": "fp8"}, "cuda"),
        ("0.5.23", SPREAD | FP4 | {"ep_size": 1}, "cuda"),
        ("0.5.23", FP4, "cuda"),
        ("0.5.23", {ON: False}, "cuda"),  # the capture can't be planned away
    ],
)
def test_plans_that_sglang_can_do(version: str, planned: dict[str, Any], device: Any) -> None:
    assert engine_arguments(version, planned=planned, device=device).arguments[ON] is True


def test_a_whole_plan_comes_back_completed() -> None:
    planned = {
        "pp_size": 1,
        "enable_hierarchical_cache": False,
        "enable_two_batch_overlap": False,
        "attn_cp_size": 1,
        "disaggregation_mode": "null",
        "speculative_algorithm": "EAGLE3",
        "speculative_eagle_topk": 1,
        "moe_runner_backend": "triton",
        "chunked_prefill_size": 8192,
        "moe_a2a_backend": "deepep",
        "speculative_num_steps": None,
    }
    plan = engine_arguments("0.5.23", planned=planned)
    drafts = {"speculative_num_steps": 3, "speculative_num_draft_tokens": 4}
    assert plan.arguments == {**planned, **drafts, ON: True}
    assert ON not in planned
    assert not any(option.startswith("--no-") for option in plan.command_line())  # SGLang knows none
    for device in ("npu:0", "NPU", ""):  # another spelling is no way past what an NPU can't
        with pytest.raises(ReplayError, match="unknown device"):
            engine_arguments("0.5.8", device=device)


@pytest.mark.parametrize(
    ("planned", "numbers"),
    [
        ({}, (1, 3, 4)),
        ({STEPS: "5"}, (1, "5", 6)),
        ({DRAFTED: 8}, (1, 7, 8)),
        ({WIDTH: 1, STEPS: 2, DRAFTED: 3}, (1, 2, 3)),
    ],
)
def test_one_draft_a_step_where_eagle_would_choose_a_tree(
    planned: dict[str, Any], numbers: tuple[Any, ...]
) -> None:
    """Every release chooses four for Grok. SGLang takes the three numbers together or not at all."""
    plan = engine_arguments("0.5.23", planned={"speculative_algorithm": "NEXTN", **planned})
    assert tuple(plan.arguments[name] for name in (WIDTH, STEPS, DRAFTED)) == numbers


def test_adaptive_drafts_choose_their_own_numbers() -> None:
    adaptive = {"speculative_algorithm": "EAGLE3", "speculative_adaptive": True}
    assert engine_arguments("0.5.23", planned=adaptive).arguments == {**adaptive, WIDTH: 1, ON: True}


def test_requests_carry_a_start_where_it_is_honoured() -> None:
    assert request_arguments("0.5.8") == {"return_routed_experts": True}
    assert request_arguments("0.5.11", start_len=9) == {"return_routed_experts": True}
    for version in ("0.5.12", "0.5.23.dev12+g1a2b3c4", "v0.5.23", "0.5.23rc1"):  # a build is that release
        assert request_arguments(version, start_len=9)["routed_experts_start_len"] == 9
    with pytest.raises(ReplayError, match="before the prompt"):
        request_arguments("0.5.23", start_len=-1)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        *((version, "tell its release") for version in ("nightly", "0.5")),
        *(
            (version, r"is older than 0\.5\.8.*Expected 0\.5\.8 or later")
            for version in ("0.5.6.post2", "0.5.7")
        ),
    ],
)
def test_no_release_of_sglang_or_one_that_nobody_checks(version: str, words: str) -> None:
    for ask in (engine_arguments, request_arguments):
        with pytest.raises(ReplayError, match=words):
            ask(version)


# The old name of the capturer's module

OLD_PATH = """
import sys
import npu_replay
from npu_replay.compat.sglang import old_path as sglang
def imported():
    from sglang.srt.layers.moe.routed_experts_capturer import extract_routed_experts_from_meta_info as found
    return found
def missing():
    try: return not imported()
    except ModuleNotFoundError as error: return "routed_experts_capturer" in str(error)
sglang.install(); sglang.install()
there = "" if missing() else imported()(None)
npu_replay.uninstall()
print(json.dumps([there, missing(), any("import_hook" in type(one).__module__ for one in sys.meta_path)]))
"""


OLD_FILE = "srt/layers/moe/routed_experts_capturer"
NEW_FILE = "srt/state_capturer/routed_experts"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "files", "printed"),
    [
        ("0.5.6", (), ["", True, False]),
        ("0.5.12", (NEW_FILE,), [NEW_FILE, True, False]),
        ("one with both", (OLD_FILE, NEW_FILE), [OLD_FILE, False, False]),
    ],
)
def test_the_capturers_old_name_of_sglang(
    version: str, files: tuple[str, ...], printed: list[Any], tmp_path: Path
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
    assert jobs.printed(OLD_PATH, path=[tmp_path], env={"NPU_REPLAY_DISABLE": ""}) == printed


# How many rows: past the end, and from a start (T30)


@pytest.mark.parametrize("version", ["0.5.7", "0.5.9", "0.5.12"])
@pytest.mark.parametrize("past", [-1, 1, 5])
def test_rows_past_the_end_until_sglang_0_5_12(version: str, past: int) -> None:
    """Speculation ran on. Rows that nothing accounts for may as well lie before the first one."""
    asked = request(version, past=past, finish="stop")
    cause = "" if past < 0 else "speculative" if release(version) >= (0, 5, 8) else "nobody checks"
    with refused(rf"rows for other tokens.*81 rows.*got {81 + past}.*{cause}"):
        decoded(asked.generate(), asked)


@pytest.mark.parametrize("version", ["0.5.7", "0.5.12", "0.5.23"])
def test_a_prefill_alone_of_sglang(version: str) -> None:
    """max_new_tokens=0, sglang#20964: the last token of the prompt ran, and its row is lost; or there is one
    too many, of a token that is sampled and counted nowhere."""
    asked = request(version, output=0, past=int(release(version) < (0, 5, 13)))
    if release(version) >= (0, 5, 13):
        assert_true(decoded(asked.generate(), asked), asked)
    else:
        with refused(r"rows for other tokens.*Expected 11 rows"):
            decoded(asked.generate(), asked)


@pytest.mark.parametrize("version", ["0.5.11", "0.5.12", "0.5.23"])
@pytest.mark.parametrize("start", [1, PROMPT])
def test_T30_rows_from_a_start_of_sglang(version: str, start: int) -> None:
    """AReno #524: the second turn's rows begin after the first's, in the releases that honour the start and
    in those that send everything. Where the request didn't carry it all rows came, and those before the start
    are left out."""
    asked = request(version, asked_from=start)
    assert_true(decoded(asked.generate(), asked, start_len=start), asked, start)
    asked.asked_from = 0
    if version == "0.5.12":  # which may have sent as many rows past the end
        with refused(rf"{81 - start} rows.*from token {start} on.*got 81"):
            decoded(asked.generate(), asked, start_len=start)
    else:
        assert_true(decoded(asked.generate(), asked, start_len=start), asked, start)


def test_T30_rows_that_may_begin_at_either_are_refused() -> None:
    """Three rows too many for those from token 3 on: they are before it, or past the end."""
    asked = request("0.5.12", asked_from=3, past=3, finish="stop")
    with refused(r"78 rows.*from token 3 on.*got 81"):
        decoded(asked.generate(), asked, start_len=3)


# How a request ends


@pytest.mark.parametrize("version", ["0.5.7", "0.5.9", "0.5.10", "0.5.23"])
def test_an_aborted_request_of_sglang(version: str) -> None:
    """Running without a capture, or in the queue, it has no rows; else tests/rollout has it."""
    asked = request(version, finish="abort", captured=False)
    assert decoded(asked.generate(), asked).recorded.tolist() == [False] * (PROMPT + OUTPUT)
    # Of one that no scheduler ever took up: it counts no prompt and has no routes.
    info = {
        "id": "3f9d",
        "finish_reason": {"type": "abort"},
        "weight_version": "default",
        "completion_tokens": 0,
    }
    never_ran = {"text": "", "output_ids": [], "meta_info": info}
    assert decoded(never_ran, request(version, output=0)).recorded.tolist() == [False] * PROMPT


def test_tokens_are_taken_away_only_at_a_stop_or_where_the_answer_shows_them() -> None:
    asked = request("0.5.23", finish="length")
    trimmed = replace(asked, output=asked.output[:-3])
    assert_true(decoded(asked.generate(), trimmed), trimmed, last=0)
    with refused(r"output_ids: .*aren't those that the engine sampled.*Expected 70 ids, got 67"):
        decoded(asked.meta_info(), trimmed)


# Whose tokens they are


def test_a_usage_that_leaves_the_stub_of_a_kimi_k3_chat_out() -> None:
    """From 0.5.17 on it says three fewer than ran."""
    asked = request("0.5.17")
    body = asked.openai()
    body["usage"]["prompt_tokens"] -= 3
    assert_true(decoded(body, asked), asked)
    with refused(r"Expected 9 ids, got 12"):
        decoded({**body, "object": "text_completion"}, asked)
    body["usage"]["prompt_tokens"] += 1  # two fewer are no stub
    with refused(r"Expected 10 ids, got 12"):
        decoded(body, asked)
    with refused(r"rows for other tokens"):
        decoded(asked.openai(), replace(asked, prompt=[1, 2, 3, *asked.prompt]))


def test_an_openai_answer_has_the_routes_beside_its_first_choice_and_the_engines_own_ids_in_places() -> None:
    """A stream's chunk with the routes comes after those of the choices, and has none."""
    asked = request("0.5.23")
    body = asked.openai()
    chunk = {"id": asked.id, "object": "chat.completion.chunk", "choices": [], "usage": None}
    assert_true(decoded({**chunk, "sglext": body["sglext"]}, asked), asked)
    assert_true(from_sglang(asked.openai("text_completion", token_ids=True), MODEL), asked)
    body["sglext"] |= {"input_ids": asked.prompt, "output_ids": [asked.output]}
    assert_true(from_sglang(body, MODEL), asked)
    with refused(r"first choice only.*n=1.*2 choices"):
        decoded(asked.openai(choices=2), asked)


# Weights, and T29


@pytest.mark.parametrize(
    ("named", "weight_version", "wanted"), [("default", None, None), ("7", None, "7"), ("7", 8, 8)]
)
def test_the_weights_are_the_callers_or_the_answers(named: str, weight_version: Any, wanted: Any) -> None:
    """«default» is what the engine says by itself."""
    asked = request("0.5.23")
    answer = asked.meta_info() | {"weight_version": named}
    assert decoded(answer, asked, weight_version=weight_version).weight_version == wanted


def test_T29_routes_that_were_computed_again_arent_paired_with_old_log_probs() -> None:
    """miles #3277: a request retracted over a weight update keeps its log-probs, not its routes."""
    version = "0.5.19"
    asked = request(version, weights=[("7", 0), ("8", 30)])
    routes = decoded(asked.generate(), asked)
    assert_true(routes, asked)
    assert routes.weight_version is None  # weights that changed in place are no one version
    asked = request(version, weights=[("7", 0), ("8", 30)], retractions=1)
    for answer in (asked.generate(), asked.openai(meta_info=True)):
        with refused(r"retracted 1 times.*first 30 output tokens.*weights 7 for tokens 0"):
            decoded(answer, asked)
    routes = decoded(asked.generate(), asked, missing="native")
    sampled_by_7 = range(PROMPT - 1, PROMPT - 1 + 30)
    assert routes.recorded.tolist() == [row not in sampled_by_7 and row < 81 for row in range(82)]
    kept = routes.recorded.numpy()
    np.testing.assert_array_equal(routes.ids.numpy()[kept], asked.rows[kept[:-1]][:, 1:])
    assert routes.fingerprint == fingerprint([*asked.prompt, *asked.output])


def spans(edges: list[tuple[int, int]]) -> list[dict[str, Any]]:
    return [{"version": str(at), "start": start, "end": end} for at, (start, end) in enumerate(edges)]


BAD_SPANS = [[(0, 5), (-5, 70)], [(-1, 70)], [(0, 40), (30, 70)], [(30, 70), (0, 30)], [(9, 8)]]


@pytest.mark.parametrize("edges", BAD_SPANS, ids=str)
def test_T29_spans_of_weights_that_cant_be(edges: list[tuple[int, int]]) -> None:
    """A start before the output, taken at its word, would leave other rows without a route than it means."""
    asked = request("0.5.23", retractions=1)
    metadata = {"weight_versions": spans(edges)}
    for answer in (asked.meta_info() | metadata, {**asked.openai(), "metadata": metadata}):
        for missing in ("error", "native"):
            with refused(r"weight_versions isn't a list of spans, one after the other"):
                decoded(answer, asked, missing=missing)


def test_T29_spans_of_weights_that_touch_are_empty_or_leave_a_gap() -> None:
    asked = request("0.5.23")
    for right in ([(0, 30), (30, 70)], [(0, 0), (0, 70)], [(0, 30), (31, 70)]):
        assert_true(decoded(asked.meta_info() | {"weight_versions": spans(right)}, asked), asked)


@pytest.mark.parametrize("version", ["0.5.11", "0.5.18"])
def test_T29_a_release_that_cant_say_so_is_warned_of_once(version: str, caplog: Any) -> None:
    asked = request(version, retractions=2, weights=[("8", 0)])
    decode._warn_of_retractions.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert_true(decoded(asked.generate(), asked), asked)
    assert [f"SGLang {version} retracted" in record.getMessage() for record in caplog.records] == [True]


# Somebody else's data


OTHER_ROWS: dict[str, tuple[Any, str]] = {
    "MoE layers alone": (
        lambda _: np.ones((81, 5, 4)),
        r"1620 ids can't be shaped. Expected 1944: 81 rows of 6 layers with top-4, got 67 rows and 12 ids",
    ),
    "top-8": (
        lambda _: np.ones((81, 6, 8)),
        "or of another model. Expected 81 rows of 6 layers with top-4.*got 162",
    ),
    "one id too few": (lambda rows: rows.reshape(-1)[:-1], r"1943 ids can't be shaped.*Expected 1944"),
    "a mark first": (
        lambda rows: np.concatenate([np.full_like(rows[:1], -1), rows[1:]]),
        r"1 of 81 rows are -1 in all layers.*row 0",
    ),
}


@pytest.mark.parametrize(("make", "words"), OTHER_ROWS.values(), ids=OTHER_ROWS)
def test_rows_of_another_model_or_of_other_tokens_are_named(make: Any, words: str) -> None:
    asked = request("0.5.23")
    with refused(words):
        decoded(with_rows(asked, make(asked.rows)), asked)


@pytest.mark.parametrize("count", [-1, "12", 1.0, True])
@pytest.mark.parametrize("key", ["prompt_tokens", "completion_tokens", "num_retractions"])
def test_a_count_of_something_else(key: str, count: Any) -> None:
    asked = request("0.5.23")
    with refused(rf"{key} is no count"):
        decoded({**asked.meta_info(), key: count}, asked)


def test_a_model_that_cannot_be_replayed_is_refused_before_the_server_starts(tmp_path: Path) -> None:
    """By the config that is given, or that lies in the planned folder."""
    looped = {"num_hidden_layers": 24, "n_routed_experts": 128, "num_experts_per_tok": 8}
    looped |= {"loop_num_passes": 3}
    (tmp_path / "config.json").write_text(json.dumps(looped))
    for about in ({"planned": {"model_path": str(tmp_path)}}, {"model": looped}):
        with pytest.raises(ReplayError, match="a looped model"):
            engine_arguments("0.5.23", **about)
    assert engine_arguments("0.5.23", planned={"model_path": "somebody/on-a-hub"}).arguments["model_path"]
