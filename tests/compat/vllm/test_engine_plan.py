"""compat.vllm.engine_plan: what turns routes on in each release, and what is refused before a start."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from npu_replay.compat.probe import Product
from npu_replay.compat.sglang import engine_arguments as sglang_arguments
from npu_replay.compat.vllm.engine_plan import capability, engine_arguments
from npu_replay.errors import ReplayError
from npu_replay.rollout import engine_plan

SWITCH = "enable_return_routed_experts"
SHARED_MEMORY = ("0.18.0", "0.19.1", "0.20.2")
MANAGER = ("0.22.0", "0.23.0", "0.24.0", "0.26.0", "0.27.0", "0.28.0", "0.30.0")
AUX_OUTPUT = ("0.31.0", "0.32.0", "0.33.0")
EVERY = (*SHARED_MEMORY, "0.21.0", *MANAGER, *AUX_OUTPUT)

QWEN3 = {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8}
QWEN3_NEXT = {**QWEN3, "layer_types": ["linear_attention", "full_attention"] * 24}
GEMMA4 = {"num_hidden_layers": 30, "num_experts": 128, "top_k_experts": 8, "enable_moe_block": True}
DENSE = {"num_hidden_layers": 28, "hidden_size": 1024}


def refused(*words: str) -> Any:
    return pytest.raises(ReplayError, match="(?s)" + ".*".join(map(re.escape, words)))


# ---- what turns it on


@pytest.mark.parametrize(
    ("version", "added"),
    [
        *(pytest.param(version, {"async_scheduling": False}, id=version) for version in SHARED_MEMORY),
        pytest.param("0.21.0", {"async_scheduling": False, "enable_prefix_caching": False}, id="0.21.0"),
        *(pytest.param(version, {}, id=version) for version in MANAGER),
        *(pytest.param(version, {"enable_prefix_caching": True}, id=version) for version in AUX_OUTPUT),
    ],
)
def test_each_release_gets_what_turns_routes_on(version: str, added: dict[str, Any]) -> None:
    plan = engine_arguments(version, planned={"tensor_parallel_size": 4, "seed": 7})
    assert plan.arguments == {"tensor_parallel_size": 4, "seed": 7, SWITCH: True, **added}
    assert f"--{SWITCH.replace('_', '-')}" in plan.command_line()
    assert plan.environment == ({"VLLM_USE_V2_MODEL_RUNNER": "1"} if version in AUX_OUTPUT else {})


def test_what_is_planned_stays_and_is_passed_on_as_what_it_means() -> None:
    planned = {
        "async_scheduling": False,
        "enable_prefix_caching": None,
        "tensor_parallel_size": "4",
        "seed": "7",
    }
    arguments = engine_arguments("0.21.0", planned=planned).arguments
    assert arguments == planned | {"enable_prefix_caching": False, "tensor_parallel_size": 4, SWITCH: True}


@pytest.mark.parametrize(
    "version", ["v0.33.0", "0.33", "0.33.0rc1", "0.33.1.dev7+g1234567", "0.34.0", "1.0.0"]
)
def test_a_build_is_its_release_and_a_newer_one_the_newest(version: str) -> None:
    assert engine_arguments(version) == engine_arguments("0.33.0")


@pytest.mark.parametrize(
    ("product", "arguments", "newest"),
    [("vLLM", engine_arguments, "0.33.0"), ("SGLang", sglang_arguments, "0.5.23")],
)
def test_a_release_that_isnt_known_is_warned_of_once(
    product: str, arguments: Any, newest: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine_plan.warn_of_later.cache_clear()
    for version in (newest, f"{newest}.post1", "0.99.0", "0.99.0"):
        arguments(version)
    (record,) = caplog.records
    assert f"no {product} 0.99.0 is known, the newest is {newest}: " in record.getMessage()


@pytest.mark.parametrize("version", ["0.1.dev123+g1234567", "nightly", "", "33", None, 0.33])
def test_a_version_that_doesnt_tell_its_release_is_asked_for(version: Any) -> None:
    with refused("this version doesn't tell its release", 'pass version="0.23.0"', repr(version)):
        engine_arguments(version)
    if not version:
        return
    if isinstance(version, str):  # images carry such builds, which go by the vLLM beside them
        assert not engine_arguments("0.28.0", vllm_ascend=version).environment
        return
    with refused("vllm-ascend: this version doesn't tell its release", 'pass vllm_ascend="0.23.0"'):
        engine_arguments("0.23.0", vllm_ascend=version)


# ---- what is refused, by argument


def connector(name: str) -> dict[str, str]:
    return {"kv_connector": name, "kv_role": "kv_both"}


def nested(name: str) -> dict[str, Any]:
    inner = {"connectors": [connector("OffloadingConnector"), connector(name)]}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": inner}


MTP = {"method": "deepseek_mtp", "num_speculative_tokens": 1}

# fmt: off
REFUSED = {
    "pp": (EVERY, {"pipeline_parallel_size": 2}, "no release captures over pipeline stages"),
    "dcp": (EVERY, {"decode_context_parallel_size": 2}, "no release captures under context parallelism"),
    "pcp": (EVERY, {"prefill_context_parallel_size": 2}, "no release captures under context parallelism"),
    "pooling": (EVERY, {"runner": "pooling"}, '"generate"'),
    "off": (EVERY, {SWITCH: False}, "True, or nothing"),
    "off-by-block": (AUX_OUTPUT, {"aux_output_config": {SWITCH: False}}, "True in it, or nothing"),
    "t32-eplb": (("0.21.0",), {"enable_eplb": True}, "0.22.0 or later"),
    **{f"halves-{name}": ((*SHARED_MEMORY, "0.21.0", *MANAGER, "0.31.0", "0.32.0"), {name: value},
        "vLLM 0.33.0 or later") for name, value in (("enable_dbo", True), ("ubatch_size", 2))},
    "dp-ep": (("0.18.0", "0.19.1"),
        {"data_parallel_size": 2, "enable_expert_parallel": True}, "vLLM 0.20.0 or later"),
    "nodes": (SHARED_MEMORY, {"nnodes": 2}, "vLLM 0.22.0 or later"),
    "connector": ((*SHARED_MEMORY, "0.21.0", *MANAGER),
        {"kv_transfer_config": connector("OffloadingConnector")}, "vLLM 0.31.0 or later"),
    "offload": ((*SHARED_MEMORY, "0.21.0", *MANAGER), {"kv_offloading_size": 8.0}, "vLLM 0.31.0 or later"),
    "async": ((*SHARED_MEMORY, "0.21.0"), {"async_scheduling": True}, "vLLM 0.22.0 or later"),
    "sequence-parallel": (("0.20.2", "0.21.0"), {"tensor_parallel_size": 2, "data_parallel_size": 2,
        "enable_expert_parallel": True}, "tensor or data parallelism alone"),
    "prefix-cache": (("0.21.0",), {"enable_prefix_caching": True}, "vLLM 0.22.0 or later"),
    "no-prefix-cache": (AUX_OUTPUT, {"enable_prefix_caching": False}, "vLLM 0.22.0 to 0.30.0"),
    "mtp": ((*SHARED_MEMORY, *MANAGER[:3]), {"speculative_config": MTP}, "vLLM 0.26.0 or later"),
    "dspark": (("0.25.0", "0.26.0", "0.27.1"), {"speculative_config": {"method": "dspark"}}, "vLLM 0.28.0"),
    "offload-text": (("0.30.0",), {"kv_offloading_size": "8", "kv_transfer_config": None},
        "Expected kv_offloading_size: no KV connector"),
    "ngrams on the device": ((*MANAGER, "0.30.0"), {"speculative_config": {"method": "ngram_gpu"}},
        'another method, such as "ngram"'),
    "mtp by its model": (MANAGER[:2],
        {"speculative_config": {"model": "Qwen/Qwen3-Next", "num_speculative_tokens": 1},
         "model": "Qwen/Qwen3-Next"}, "vLLM 0.26.0 or later"),
    "adaptive": (("0.28.0", "0.30.0", *AUX_OUTPUT),
        {"speculative_config": {"method": "eagle3", "enable_adaptive_verification": True}},
        "enable_adaptive_verification=False"),
    "monolithic": (("0.20.2", "0.26.0"), {"moe_backend": "flashinfer-trtllm"}, "vLLM 0.27.0 or later"),
    "nixl": (AUX_OUTPUT, {"kv_transfer_config": connector("NixlPullConnector")}, "connectors that offload"),
    "mooncake": (AUX_OUTPUT, {"kv_transfer_config": nested("MooncakeConnector")}, "Mooncake"),
}
# fmt: on


@pytest.mark.parametrize(
    ("version", "planned", "remedy"),
    [
        pytest.param(version, planned, remedy, id=f"{version}-{name}")
        for name, (versions, planned, remedy) in REFUSED.items()
        for version in versions
    ],
)
def test_an_argument_that_the_release_cant_is_refused_by_name(
    version: str, planned: dict[str, Any], remedy: str
) -> None:
    with refused(f"rollout: vLLM {version} gives no routes, or wrong ones", next(iter(planned)), remedy):
        engine_arguments(version, planned=planned)


# fmt: off
ALLOWED = {
    "one-of-each": (EVERY,
        {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "data_parallel_size": 1,
        "nnodes": 1, "enable_eplb": False, "kv_transfer_config": None, "speculative_config": None,
        "runner": "generate"}),
    "halves": (("0.33.0",), {"enable_dbo": True, "ubatch_size": 2}),
    "no-halves": (EVERY, {"enable_dbo": False, "ubatch_size": 0}),
    "one-batch": (EVERY, {"ubatch_size": 1}),
    "eplb": (("0.18.0", "0.20.2", "0.22.0", "0.33.0"), {"enable_eplb": True}),
    "dp-ep": (("0.20.0", "0.33.0"), {"data_parallel_size": 2, "enable_expert_parallel": True}),
    "nodes": (("0.21.0", "0.22.0"), {"nnodes": 2}),
    "connector": (AUX_OUTPUT, {"kv_transfer_config": connector("OffloadingConnector")}),
    "multi-connector": (AUX_OUTPUT, {"kv_transfer_config": nested("LMCacheConnectorV1")}),
    "mooncake-store": (AUX_OUTPUT, {"kv_transfer_config": connector("MooncakeStoreConnector")}),
    "offload": (AUX_OUTPUT, {"kv_offloading_size": 8.0}),
    "async": (("0.22.0", "0.33.0"), {"async_scheduling": True}),
    "no sequence-parallel": (("0.20.2",), {"tensor_parallel_size": 2, "data_parallel_size": 2,
        "enable_expert_parallel": True, "all2all_backend": "flashinfer_nvlink_one_sided"}),
    "sequence-parallel": (("0.22.0", "0.33.0"), {"tensor_parallel_size": 2, "data_parallel_size": 2,
        "enable_expert_parallel": True}),
    "mtp": (("0.21.0", "0.26.0", "0.33.0"), {"speculative_config": MTP}),
    "dspark": (("0.28.0", "0.33.0"), {"speculative_config": {"method": "dspark", "model": "x"}}),
    "draft-of-that-name": (("0.27.0",), {"speculative_config": {"method": "eagle3", "model": "dspark"}}),
    "no-offload": (("0.30.0",), {"kv_offloading_size": 0.0}),
    "ngram": (("0.20.2", "0.23.0"), {"speculative_config": {"method": "ngram"}}),
    "ngrams on the device": (("0.20.2", "0.31.0"), {"speculative_config": {"method": "ngram_gpu"}}),
    "a draft of its own": (("0.23.0",),
        {"speculative_config": {"model": "a/draft"}, "model": "Qwen/Qwen3-Next"}),
    "monolithic": (("0.27.0", "0.33.0"), {"moe_backend": "flashinfer_trtllm"}),
}
# fmt: on


@pytest.mark.parametrize(
    ("version", "planned"),
    [
        pytest.param(version, planned, id=f"{version}-{name}")
        for name, (versions, planned) in ALLOWED.items()
        for version in versions
    ],
)
def test_an_argument_that_the_release_can_is_passed_on(version: str, planned: dict[str, Any]) -> None:
    arguments = engine_arguments(version, planned=planned).arguments
    assert {name: arguments[name] for name in planned if planned[name] is not None} == {
        name: value for name, value in planned.items() if value is not None
    }


# ---- how arguments are written


AS_TEXT = [
    *({"enable_eplb": value} for value in ("true", "True", "on", 1)),
    *({"async_scheduling": value} for value in ("true", 1)),
    *({"pipeline_parallel_size": value} for value in ("2", "2.0", 2.0)),
    {"kv_offloading_size": "0.5"},
    *({SWITCH: value} for value in ("false", "off", 0)),
    {"kv_transfer_config": '{"kv_connector": "OffloadingConnector"}'},
]


@pytest.mark.parametrize("planned", AS_TEXT, ids=str)
def test_what_is_written_as_in_a_shell_is_read(planned: dict[str, Any]) -> None:
    """Taken for its default it would start, and give no routes."""
    with refused("rollout: ", next(iter(planned))):
        engine_arguments("0.21.0", planned=planned)


# ---- models


UNEQUAL = [{"block_type": "moe", "num_experts_per_tok": topk} for topk in (4, 6)]
WINDOWS = QWEN3 | {"layer_types": ["sliding_attention", "full_attention"] * 24}
HYBRID = ("reads the rows", "linear attention", "0.22.0 or later", "vllm#37118")
MODELS: list[tuple[tuple[str, ...], dict[str, Any], tuple[str, ...]]] = [
    # releases, the model, and in which words it is refused; none: it is taken
    (("0.18.0", "0.33.0"), DENSE, ("doesn't say the number of routed experts", "a model without experts")),
    (("0.18.0", "0.33.0"), QWEN3, ()),
    (("0.18.0", "0.33.0"), QWEN3 | {"loop_num_passes": 3}, ("a looped model", "loop_num_passes=3")),
    (
        ("0.18.0", "0.33.0"),
        QWEN3 | {"num_hidden_layers": 2, "block_configs": UNEQUAL},
        ("block_configs, layer 1", "part by part"),
    ),
    (SHARED_MEMORY, QWEN3_NEXT, HYBRID),  # T23
    (("0.21.0", "0.33.0"), QWEN3_NEXT, ()),
    (SHARED_MEMORY, WINDOWS, ("two kinds of attention", "disable_hybrid_kv_cache_manager=True")),
    (("0.22.0", "0.33.0"), WINDOWS, ()),
    (
        ("0.18.0", "0.21.0"),
        GEMMA4,  # its top-k has another key
        ("doesn't find this model's top-k", "0.22.0 or later", "top_k_experts"),
    ),
    (("0.22.0",), GEMMA4, ()),
    # kernels for a CPU that choose past the capture
    (("0.20.2+cpu", "0.28.0+cpu"), QWEN3, ("gives zeros for every id", "on a CPU", "take 0.30.0")),
    (("0.30.0+cpu",), QWEN3, ()),
]


@pytest.mark.parametrize(
    ("version", "model", "words"),
    [(version, model, words) for versions, model, words in MODELS for version in versions],
)
def test_a_model_that_a_release_cant_is_refused(
    version: str, model: dict[str, Any], words: tuple[str, ...]
) -> None:
    with refused(*words) if words else nullcontext():
        assert engine_arguments(version, model=model).arguments[SWITCH] is True


def test_a_model_that_is_planned_is_looked_at_where_it_lies(tmp_path: Path) -> None:
    """In which forms it may be given: tests/rollout/test_model_config.py."""
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    with refused("doesn't say the number of routed experts"):
        engine_arguments("0.33.0", planned={"model": str(tmp_path)})
    engine_arguments("0.33.0", planned={"model": "Qwen/Qwen3-30B-A3B"})  # of a hub, so it isn't asked


def test_windows_share_the_blocks_of_full_attention_where_a_plan_says_so() -> None:
    together = {"disable_hybrid_kv_cache_manager": True}
    assert engine_arguments("0.20.2", planned=together, model=WINDOWS).arguments[SWITCH] is True


# ---- on Ascend


@pytest.mark.parametrize(
    ("version", "vllm_ascend", "model", "needed"),
    [
        ("0.30.0", "0.30.0rc2", QWEN3, True),
        ("0.29.0", "0.29.0rc1", QWEN3, False),
        ("0.29.0", "0.29.0rc1", QWEN3_NEXT, True),
        ("0.29.0", "0.29.0rc1", WINDOWS, True),
    ],
)
def test_on_ascend_the_second_model_runner_is_in_the_environment(
    version: str, vllm_ascend: str, model: dict[str, Any], needed: bool
) -> None:
    plan = engine_arguments(version, vllm_ascend=vllm_ascend, model=model)
    assert (plan.environment.get("VLLM_USE_V2_MODEL_RUNNER") == "1") == needed


# ---- doctor


@pytest.mark.parametrize(
    ("product", "state", "words"),
    [
        (Product("vllm", installed=False), "missing", "not installed"),
        (Product("vllm", installed=True, version="0.1.dev1+g1234567"), "works", "isn't known"),
        (Product("vllm", installed=True, version="0.17.1"), "broken", "is older than 0.18.0"),
        (Product("vllm", installed=True, version="0.23.0+cpu"), "broken", "zeros"),
        (Product("vllm", installed=True, version="0.30.0+cpu"), "works", SWITCH),
        (Product("vllm", installed=True, version="0.23.0"), "works", SWITCH),
    ],
    ids=lambda value: value.version if isinstance(value, Product) else None,
)
def test_doctor_is_told(product: Product, state: str, words: str) -> None:
    entry = capability(product)
    assert entry.state == state
    assert words in entry.why


@pytest.mark.parametrize("soc", ["A3", "a3", "910C", "910c"])
def test_a_processor_has_the_name_of_its_generation_or_of_its_chip(soc: str) -> None:
    planned = {"tensor_parallel_size": 4, "enable_expert_parallel": True}
    with refused("captures one token in 4 on A3"):
        engine_arguments("0.30.0", planned=planned, vllm_ascend="0.30.0", soc=soc)
    with refused("unknown processor", "'A2' or 'A3' or 'A5' or '310P', got 'A4'"):
        engine_arguments("0.30.0", planned=planned, vllm_ascend="0.30.0", soc="A4")
