"""compat.vllm_ascend: which release and which setting gives zeros, refused before a rollout is paid for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from npu_replay.compat.probe import Product
from npu_replay.compat.vllm_ascend import releases as vllm_ascend
from npu_replay.compat.vllm_ascend.releases import capability, needs_v2, refusal
from npu_replay.rollout.release_rules import Symptom

UNQUANTIZED = ("0.18.0rc1", "0.18.0", "0.22.1rc1", "0.23.0", "0.23.0.post1")
ZEROS = ("0.24.0rc1", "0.25.1rc1", "0.26.0rc1")
ALL = ("0.27.1rc1", "0.28.0rc1", "0.30.0rc2", "0.35.0")

QWEN3 = {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}
QWEN3_NEXT = {**QWEN3, "layer_types": ["linear_attention", "full_attention"] * 24}
WINDOWS = {**QWEN3, "layer_types": ["sliding_attention", "full_attention"] * 24}
HYBRIDS = (
    QWEN3_NEXT,
    {"text_config": {**QWEN3, "full_attention_interval": 4}},  # Qwen3.5
    {**QWEN3, "hybrid_override_pattern": "MEM*E"},  # Nemotron-H
    {**QWEN3, "attn_layer_period": 8},  # Jamba
)


SPREAD = {"enable_expert_parallel": True}
"""Experts over the ranks."""
TWO_HALVES = "captures wrong rows with two half batches"
LATE = r"{version} hands out rows of the next step.*async_scheduling=False.*#10727"
SPLIT = (
    r"captures one token in {tp} on {soc}: the other rows would be zeros or, from 0\.28\.0rc1 on, an earlier "
    r"step's\. Expected expert parallelism off"
)
FLASH = {"additional_config": {"enable_flashcomm1": True}, "tensor_parallel_size": 2, "data_parallel_size": 2}
FOUR = {"data_parallel_size": 4} | SPREAD
ROWS: list[tuple[tuple[str, ...], dict[str, Any], str]] = [
    # releases, the plan, and in which words it is refused; empty: it is taken
    (
        ("0.11.0",),
        {"model": QWEN3},
        "vllm-ascend {version} is older than 0.18.0.*Expected 0.18.0 and later.*nobody checks",
    ),
    (("0.17.0rc1",), {"model": QWEN3}, "vllm-ascend {version} is older than"),
    (ZEROS, {"model": QWEN3}, r"{version} gives zeros for every id.*27\.1rc1.*vllm-ascend#16314"),  # T32
    ((*UNQUANTIZED, *ALL), {"model": QWEN3, "tensor_parallel_size": 8}, ""),
    *(
        row
        for plan, words in (
            ({"quantization": "fp8"}, "captures no quantized experts.*Expected an unquantized model.*fp8"),
            ({"soc": "310P"}, r"captures nothing on 310P.*0\.27\.1rc1"),
            # 0.21 to 0.24 have the patch that mends it, and don't install it on the vLLM that they are for.
            (
                {"data_parallel_size": 2},
                r"ends in an AssertionError under data par.*0\.27\.1rc1.*#9728.*0\.25\.1rc1",
            ),
        )
        for row in (
            (UNQUANTIZED, plan | {"model": QWEN3}, "{version} " + words),
            (ALL, plan | {"model": QWEN3}, ""),
        )
    ),
    *(  # T23
        row
        for model in HYBRIDS
        for row in (
            (
                ("0.18.0", "0.27.1rc1"),
                {"model": model},
                r"{version} reads the rows of a model with linear attention.*0\.28\.0rc1",
            ),
            (ALL[1:], {"model": model}, ""),
        )
    ),
    (("0.18.0", "0.23.0", "0.27.1rc1"), {"model": WINDOWS}, "two kinds of attention.*kv_cache_manager=True"),
    (("0.23.0",), {"model": WINDOWS, "disable_hybrid_kv_cache_manager": True}, ""),
    (("0.18.0",), {"model": WINDOWS, "capture": True}, "captures no model with two kinds of attention"),
    (("0.23.0",), {"model": WINDOWS, "capture": True}, ""),
    (ALL[1:], {"model": WINDOWS}, ""),
    # tokens that are split over tensor-parallel ranks before they are routed
    *(
        (("0.18.0", "0.27.1rc1", "0.30.0rc2"), {"tensor_parallel_size": tp, "soc": soc, **more}, words)
        for soc, tp, splits in (
            *(("A3", 2, True), ("A3", 16, True), ("A5", 4, True)),
            *(("A2", 8, False), ("A2", 16, True)),
        )
        for more, words in (
            (SPREAD, SPLIT.replace("{tp}", str(tp)).replace("{soc}", soc) if splits else ""),
            ({}, ""),  # experts aren't spread
            (SPREAD | {"soc": None}, ""),  # nobody says the processor
        )
    ),
    *(
        row
        for plan in ({"enable_dbo": True}, {"ubatch_size": 2})
        for row in (
            ((*UNQUANTIZED, *ALL), plan, TWO_HALVES),
            ((*UNQUANTIZED, *ALL[:-1]), plan | {"capture": True}, TWO_HALVES),
        )
    ),
    ((*UNQUANTIZED, *ALL), {"enable_dbo": False, "ubatch_size": 1}, ""),
    *((UNQUANTIZED[:3], {"async_scheduling": True} | more, LATE) for more in ({}, {"capture": True})),
    ((*UNQUANTIZED[3:], "0.27.1rc1"), {"async_scheduling": True}, ""),
    ((*UNQUANTIZED, "0.27.1rc1"), {"async_scheduling": False}, ""),
    # MC2 at one tensor-parallel rank: the patch of 0.25.1 on knows its rows with several alone
    *(
        (("0.27.1rc1", "0.30.0rc2"), FOUR | more, words)
        for more, words in (
            ({}, ""),  # nobody says the processor
            ({"soc": "A3"}, "ends in an AssertionError on A3"),
            ({"soc": "A2"}, ""),
            ({"soc": "A3", "tensor_parallel_size": 2}, ""),
            ({"soc": "A3", "capture": True}, ""),
        )
    ),
    # from 0.27 on flash comm is vLLM's `use_sequence_parallel_moe`, which asks for all three, off by itself
    *(
        (ALL[:2], FLASH | SPREAD | more, words)
        for more, words in (
            ({}, "wrong rows with flash comm"),
            ({"additional_config": {"enable_dsa_cp": True}}, "wrong rows with flash comm"),
            ({"capture": True}, ""),
            ({"data_parallel_size": 1, "soc": "310P"}, ""),
            ({"enable_expert_parallel": False}, ""),
            ({"tensor_parallel_size": 1}, ""),
            ({"additional_config": {}}, ""),
        )
    ),
    # a release that isn't known to a plan; a worker looks at its classes: tests/on_vllm_ascend
    (
        ("nightly", "0.21.0rc1", "0.32.0rc1"),
        {"capture": True},
        "captures nothing on vllm-ascend {version}.*return no rows by vLLM's capturer",
    ),
]


def check(version: str, words: str, plan: dict[str, Any]) -> None:
    arguments = dict(plan)
    problem = refusal(version, arguments, capture=arguments.pop("capture", False))
    assert (problem is not None) == bool(words), problem
    assert re.search(words.replace("{version}", version), str(problem)), problem


@pytest.mark.parametrize(
    ("version", "plan", "words"),
    [(version, plan, words) for versions, plan, words in ROWS for version in versions],
)
def test_plans_that_give_no_routes_are_refused_and_no_others(
    version: str, plan: dict[str, Any], words: str
) -> None:
    check(version, words, plan)


def test_which_releases_need_another_runner_or_scheduling() -> None:
    for version in ALL[1:]:
        assert needs_v2(version, QWEN3_NEXT)
        assert needs_v2(version, WINDOWS)
        assert needs_v2(version) == (version >= "0.30")
    for version in (*UNQUANTIZED, "0.27.1rc1"):
        assert vllm_ascend.needs_sync(version) == (version < "0.23")


def test_a_models_own_folder_says_that_it_is_quantized(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    check("0.23.0", "", {"model": tmp_path})
    (tmp_path / "quant_model_description.json").write_text("{}")
    check("0.23.0", "captures no quantized.*quant_model_description.json", {"model": str(tmp_path)})
    quantized = {**QWEN3, "quantization_config": {"quant_method": "fp8"}}
    check("0.23.0", "captures no quantized experts.*quantization_config", {"model": quantized})


@pytest.mark.parametrize(
    ("version", "symptom", "words"),
    [
        ("0.23.0", Symptom.ZEROS, "captures no quantized experts"),
        ("0.26.0rc1", Symptom.ZEROS, "skips the capture"),
        ("0.29.0rc1", Symptom.ZERO_ROWS, "KV cache group 0"),
        ("0.27.1rc1", Symptom.ZERO_ROWS, "the other rows are zeros"),
        ("0.28.0rc1", Symptom.STALE_ROWS, "the other rows are an earlier step's"),
        ("0.30.0rc2", Symptom.STALE_ROWS, "one tensor-parallel rank's tokens"),
    ],
)
def test_its_faults_are_named_with_its_release(version: str, symptom: Symptom, words: str) -> None:
    (cause,) = [fault.cause for fault in vllm_ascend.faults(version) if fault.symptom is symptom]
    assert f"vllm-ascend {version}" in cause
    assert words in cause


@pytest.mark.parametrize(
    ("product", "state", "words"),
    [
        (Product("vllm-ascend", installed=False), "missing", "not installed"),
        (Product("vllm-ascend", installed=True, problem="half installed: x"), "broken", "half installed"),
        (Product("vllm-ascend", installed=True), "works", "release isn't known"),
        (Product("vllm-ascend", installed=True, version="0.13.0"), "broken", "is older than 0.18.0"),
        (Product("vllm-ascend", installed=True, version="0.18.0"), "works", "unquantized experts alone"),
        (
            Product("vllm-ascend", installed=True, version="0.23.0.post1"),
            "works",
            "unquantized experts alone",
        ),
        (Product("vllm-ascend", installed=True, version="0.26.0rc1"), "broken", "zeros for every id"),
        (Product("vllm-ascend", installed=True, version="0.29.0rc1"), "works", "every layer"),
        (Product("vllm-ascend", installed=True, version="0.30.0rc2"), "works", "VLLM_USE_V2_MODEL_RUNNER=1"),
    ],
    ids=lambda value: value.version if isinstance(value, Product) else None,
)
def test_doctor_is_told(product: Product, state: str, words: str) -> None:
    entry = capability(product)
    assert entry.state == state
    assert words in entry.why
    assert entry.remedy.startswith("take ") == (entry.state == "broken" and bool(product.version))


@pytest.mark.parametrize(
    ("version", "vllm", "rules"),
    [
        *(("0.23.0", "0.23.0", "0.23.0"), ("0.18.1.dev45+g1", "0.18.0", "0.18.0")),
        *(("0.17.0rc2.dev109+g5487946", "0.18.0", "0.18.0"), ("0.1.dev1+g1", "0.23.0", "0.23.0")),
        *(("0.30.0rc2", "0.30.0", "0.30.0rc2"), ("nightly", "0.23.0", "0.23.0"), ("", "0.23.0", "")),
    ],
)
def test_a_build_between_releases_has_the_rules_of_its_vllm(version: str, vllm: str, rules: str) -> None:
    assert vllm_ascend.of_release(version, vllm) == rules
