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
QWEN3_5 = {"text_config": {**QWEN3, "full_attention_interval": 4}}
NEMOTRON_H = {**QWEN3, "hybrid_override_pattern": "MEM*E"}
JAMBA = {**QWEN3, "attn_layer_period": 8}
HYBRIDS = {"qwen3-next": QWEN3_NEXT, "qwen3.5": QWEN3_5, "nemotron-h": NEMOTRON_H, "jamba": JAMBA}


def check(version: str, capture: bool = False, refused: str = "", **plan: Any) -> None:
    """It is refused with these words, or taken where there are none."""
    problem = refusal(version, plan, capture=capture)
    assert (problem is not None) == bool(refused), problem
    assert re.search(refused, str(problem)), problem


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.11.0", "vllm-ascend 0.11.0 is older than 0.18.0.*Expected 0.18.0 and later.*nobody checks"),
        ("0.17.0rc1", "vllm-ascend 0.17.0rc1 is older than"),
        *(
            (version, f"{version} gives zeros for every id.*27\\.1rc1.*vllm-ascend#16314")
            for version in ZEROS
        ),
    ],
)
def test_t32_a_release_that_gives_zeros_or_that_nobody_checks_is_refused(version: str, words: str) -> None:
    check(version, refused=words, model=QWEN3)


REFUSED_BEFORE_0_27 = {
    "quantized": (
        {"quantization": "fp8"},
        "captures no quantized experts.*Expected an unquantized model.*fp8",
    ),
    "310P": ({"soc": "310P"}, r"captures nothing on 310P.*0\.27\.1rc1"),
    # 0.21 to 0.24 have the patch that mends it, and don't install it on the vLLM that they are made for.
    "data parallel": (
        {"data_parallel_size": 2},
        r"ends in an AssertionError under data par.*0\.27\.1rc1.*#9728.*0\.25\.1rc1",
    ),
}


@pytest.mark.parametrize(("plan", "words"), REFUSED_BEFORE_0_27.values(), ids=REFUSED_BEFORE_0_27)
@pytest.mark.parametrize("version", [*UNQUANTIZED, *ALL])
def test_what_is_not_captured_before_0_27_1rc1(version: str, plan: dict[str, Any], words: str) -> None:
    check(version, model=QWEN3, tensor_parallel_size=8)
    check(version, refused="" if version in ALL else f"{version} {words}", model=QWEN3, **plan)


@pytest.mark.parametrize("version", ["0.18.0", "0.27.1rc1", *ALL[1:]])
@pytest.mark.parametrize("model", HYBRIDS.values(), ids=HYBRIDS.keys())
def test_t23_hybrid_models_need_0_28_0rc1_and_the_second_model_runner(
    version: str, model: dict[str, Any]
) -> None:
    if version in ALL[1:]:
        check(version, model=model)
        assert needs_v2(version, model)
        assert needs_v2(version) == (version >= "0.30")
        return
    check(
        version,
        refused=rf"{version} reads the rows of a model with linear attention.*0\.28\.0rc1",
        model=model,
    )


def test_a_models_own_folder_says_that_it_is_quantized(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    check("0.23.0", model=tmp_path)
    (tmp_path / "quant_model_description.json").write_text("{}")
    check("0.23.0", refused="captures no quantized.*quant_model_description.json", model=str(tmp_path))
    quantized = {**QWEN3, "quantization_config": {"quant_method": "fp8"}}
    check("0.23.0", refused="captures no quantized experts.*quantization_config", model=quantized)


@pytest.mark.parametrize(
    ("soc", "tensor_parallel", "splits"),
    [("A3", 2, True), ("A3", 16, True), ("A5", 4, True), ("A2", 8, False), ("A2", 16, True)],
)
@pytest.mark.parametrize("version", ["0.18.0", "0.27.1rc1", "0.30.0rc2"])
def test_tokens_split_over_tensor_parallel_ranks_are_refused(
    version: str, soc: Any, tensor_parallel: int, splits: bool
) -> None:
    spread = {"tensor_parallel_size": tensor_parallel, "enable_expert_parallel": True, "soc": soc}
    says = (
        rf"captures one token in {tensor_parallel} on {soc}: the other rows would be zeros or, from "
        rf"0\.28\.0rc1 on, an earlier step's\. Expected expert parallelism off"
    )
    check(version, refused=says if splits else "", **spread)
    check(version, tensor_parallel_size=tensor_parallel, soc=soc)  # experts aren't spread
    check(version, **spread | {"soc": None})  # nobody says the processor


@pytest.mark.parametrize("plan", [{"enable_dbo": True}, {"ubatch_size": 2}], ids=str)
@pytest.mark.parametrize("version", [*UNQUANTIZED, *ALL])
def test_two_half_batches_at_once_are_refused_whoever_captures(version: str, plan: dict[str, Any]) -> None:
    says = "captures wrong rows with two half batches"
    check(version, refused=says, **plan)
    if vllm_ascend.unknown(version) is None:
        check(version, capture=True, refused=says, **plan)
    check(version, enable_dbo=False, ubatch_size=1)


@pytest.mark.parametrize("version", [*UNQUANTIZED, "0.27.1rc1"])
def test_asynchronous_scheduling_is_refused_before_0_23_0(version: str) -> None:
    says = rf"{version} hands out rows of the next step.*async_scheduling=False.*#10727"
    check(version, refused=says if version < "0.23" else "", async_scheduling=True)
    assert vllm_ascend.needs_sync(version) == (version < "0.23")
    check(version, async_scheduling=False)


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
    found = capability(product)
    assert found.state == state
    assert words in found.why
    assert found.remedy.startswith("take ") == (found.state == "broken" and bool(product.version))


@pytest.mark.parametrize("release", ["0.27.1rc1", "0.30.0rc2"])
def test_tokens_that_are_filled_up_over_data_parallel_ranks_alone_end_the_engine(release: str) -> None:
    """MC2 at one tensor-parallel rank: the patch of 0.25.1 on knows its rows with several alone."""
    spread = {"data_parallel_size": 4, "enable_expert_parallel": True}
    check(release, **spread)  # nobody says the processor
    check(release, refused="ends in an AssertionError on A3", **spread, soc="A3")
    check(release, **spread, soc="A2")
    check(release, **spread, soc="A3", tensor_parallel_size=2)
    check(release, **spread, soc="A3", capture=True)


@pytest.mark.parametrize("version", ALL[:2])
@pytest.mark.parametrize("switch", ["enable_flashcomm1", "enable_dsa_cp"])
def test_flash_comm_hands_out_wrong_rows_where_tokens_are_shared_out(version: str, switch: str) -> None:
    """From 0.27 on it is vLLM's `use_sequence_parallel_moe`, which asks for all three, and off by itself."""
    spread = {"tensor_parallel_size": 2, "data_parallel_size": 2, "enable_expert_parallel": True}
    flash = {"additional_config": {switch: True}}
    check(version, refused="wrong rows with flash comm", **flash, **spread)
    check(version, **flash, **spread, capture=True)
    check(version, **flash, **spread | {"data_parallel_size": 1, "soc": "310P"})
    check(version, **flash, **spread | {"enable_expert_parallel": False})
    check(version, **flash, **spread | {"tensor_parallel_size": 1})
    check(version, **spread)


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


@pytest.mark.parametrize("version", ["nightly", "0.21.0rc1", "0.32.0rc1"])
def test_a_plan_for_a_release_that_is_not_known_is_refused(version: str) -> None:
    """A worker looks at its classes instead: tests/on_vllm_ascend."""
    problem = str(refusal(version, capture=True))
    assert f"captures nothing on vllm-ascend {version}" in problem
    assert "return no rows by vLLM's capturer" in problem
