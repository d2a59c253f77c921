"""compat.engines: each framework's config gives a plan, which the engines' tables judge; errors name its key.

verl's own configs: tests/on_verl/test_config.py.
"""

from __future__ import annotations

import logging
import re
from contextlib import nullcontext
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from npu_replay.compat import engines, probe
from npu_replay.errors import ReplayError

MTP = {"method": "mtp", "num_speculative_tokens": 1}
ASCEND = {"vllm-ascend": "0.23.0", "vllm": "0.23.0"}
NIGHTLY = {"vllm-ascend": "0.1.dev1+g1234567", "vllm": "0.1.dev1+g7654321"}


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The releases that are found here."""
    releases = {"vllm": "0.23.0", "sglang": "0.5.12"}
    products = lambda: tuple(probe.Product(name, True, releases[name], "/there") for name in releases)  # noqa: E731
    monkeypatch.setattr(probe, "products", products)
    monkeypatch.delenv("NPU_REPLAY_VLLM_ASCEND", raising=False)
    return releases


def verl(
    engine: str,
    *,
    mtp: Any = None,
    disaggregated: bool = False,
    options: Any = MappingProxyType({}),
    **own: Any,
) -> dict[str, Any]:
    """A rollout's config, as a dict; `options` are the engine's."""
    apart = {"disaggregation": {"enabled": disaggregated}, "mtp": mtp}
    return {"rollout": {"name": engine, "engine_kwargs": {engine: dict(options)}, **apart, **own}}


def roll(engine: str, **options: Any) -> Any:
    strategy = SimpleNamespace(strategy_name=engine, strategy_config=options)
    return SimpleNamespace(strategy_args=strategy, model_args=SimpleNamespace(model_name_or_path="a/b"))


ASKS = {"enable_return_routed_experts": True}


def swift(**changes: Any) -> Any:
    plan = {"use_vllm": True, "vllm_mode": "colocate", "model": "a/b", "vllm_engine_kwargs": ASKS}
    return SimpleNamespace(**plan | changes)


SGLANGS_OWN = {
    "sglang_disaggregation_mode": "null",
    "sglang_pp_size": 1,
    "sglang_moe_runner_backend": "auto",
    "sglang_enable_lmcache": False,
}


def slime(**changes: Any) -> Any:
    """SGLang's own defaults stand beside what is asked for."""
    return SimpleNamespace(**{"hf_checkpoint": "a/b", **SGLANGS_OWN, **changes})


DRAFTS = {"enable": True, "enable_rollout": True, "method": "mtp", "speculative_algorithm": "EAGLE"}
ROLLOUT = "actor_rollout_ref.rollout."
REFUSED: list[tuple[Any, Any, str]] = [
    ("verl", verl("vllm", options={"enable_dbo": True}), f"{ROLLOUT}engine_kwargs.vllm.enable_dbo=True"),
    ("verl", verl("vllm", options={"enable-dbo": "true"}), f"{ROLLOUT}engine_kwargs.vllm.enable-dbo=True"),
    ("verl", verl("vllm", pipeline_model_parallel_size=2), f"{ROLLOUT}pipeline_model_parallel_size=2"),
    ("verl", verl("vllm", mtp=DRAFTS), f"{ROLLOUT}mtp.enable_rollout={{'method': 'mtp'}}"),
    ("verl", verl("sglang", mtp=DRAFTS), f"{ROLLOUT}mtp.speculative_algorithm='EAGLE'"),
    ("verl", verl("vllm", disaggregated=True), f"{ROLLOUT}disaggregation.enabled="),
    ("verl", verl("sglang", disaggregated=True), f"{ROLLOUT}disaggregation.enabled='prefill'"),
    (
        "ROLL",
        roll("sglang", enable_hierarchical_cache=True),
        "strategy_config.enable_hierarchical_cache=True",
    ),
    (
        "ROLL",
        roll("vllm", pipeline_parallel_size=2),
        "strategy_args.strategy_config.pipeline_parallel_size=2",
    ),
    ("ms-swift", swift(vllm_pipeline_parallel_size=2), "got vllm_pipeline_parallel_size=2"),
    ("ms-swift", swift(vllm_engine_kwargs='{"ubatch_size": "2"}'), "got vllm_engine_kwargs: ubatch_size=2"),
    ("ms-swift", swift(vllm_speculative_config=MTP), "got vllm_speculative_config="),
    ("TRL", swift(vllm_enable_dbo=True), "got vllm_enable_dbo=True"),
    ("slime", slime(sglang_speculative_algorithm="NGRAM"), "got --sglang-speculative-algorithm='NGRAM'"),
    ("slime", slime(sglang_pp_size=2), "got --sglang-pp-size=2"),
    ("slime", slime(sglang_attn_cp_size=2), "got --sglang-attn-cp-size=2"),
]


LET_THROUGH: list[tuple[Any, Any]] = [
    ("verl", verl("vllm", data_parallel_size="2", tensor_model_parallel_size=4, expert_parallel_size=8)),
    ("verl", verl("vllm", mtp={**DRAFTS, "enable_rollout": False}, options={"no-enable-dbo": True})),
    ("verl", verl("vllm", mtp=DRAFTS, options={"speculative_config": {"method": "ngram"}})),
    ("verl", verl("sglang", data_parallel_size=2, max_num_seqs=1024, options={"chunked_prefill_size": None})),
    ("verl", verl("trtllm", options={"pipeline_parallel_size": 2})),  # nothing is known of it
    ("ROLL", roll("sglang", mem_fraction_static=0.7, tp_size=2)),
    ("ROLL", roll("fsdp2_train", pipeline_parallel_size=2)),
    ("ms-swift", swift(vllm_engine_kwargs={"enable_return_routed_experts": True}, vllm_quantization=None)),
    (
        "ms-swift",
        swift(vllm_mode="server", vllm_pipeline_parallel_size=2),
    ),  # that server is started elsewhere
    ("TRL", swift(vllm_tensor_parallel_size=2, vllm_importance_sampling_mode="token_truncate")),
    ("slime", slime(sglang_mem_fraction_static=0.8, sglang_router_ip="10.0.0.1")),
]


AHEAD = r"asynchronous scheduling, which is on by itself\. Expected async_scheduling=False, got"
UNASKED = r"isn't asked for routes\. Expected --vllm_engine_kwargs '{\"enable"
ROWS: list[tuple[dict[str, str], Any, Any, str]] = [
    # releases that are here, the framework, its config, and in which words it is refused; empty: it is taken
    *(({}, framework, config, re.escape(key)) for framework, config, key in REFUSED),
    *(({}, framework, config, "") for framework, config in LET_THROUGH),
    # scheduling ahead, where its rows are another request's
    *(
        (releases, framework, config, words)
        for releases in ({"vllm": "0.20.2"}, {"vllm": "0.22.1", "vllm-ascend": "0.22.1rc1"})
        for framework, config, words in (
            *(("ms-swift", swift(), AHEAD), ("TRL", swift(), AHEAD), ("ROLL", roll("vllm"), AHEAD)),
            ("ROLL", roll("vllm", async_scheduling=True), r"strategy_config\.async_scheduling=True"),
            ("ROLL", roll("vllm", async_scheduling=False), ""),
            ("ms-swift", swift(vllm_engine_kwargs=ASKS | {"async_scheduling": False}), ""),
            # vLLM turns it off by itself
            ("ROLL", roll("vllm", speculative_config={"method": "ngram"}), ""),
            ("ROLL", roll("vllm", distributed_executor_backend="ray"), ""),
            ("ROLL", roll("vllm", speculative_config={"method": "eagle3"}), "asynchronous scheduling"),
        )
    ),
    ({"vllm": "0.1.dev1+g7654321"}, "ms-swift", swift(), ""),  # which release, nobody tells
    # ms-swift's engine has to be asked; TRL hands no argument on, and the others ask by themselves
    *(
        row
        for options in (None, {"enable_eplb": True})
        for row in (
            ({}, "ms-swift", swift(vllm_engine_kwargs=options), UNASKED),
            ({}, "ms-swift", swift(vllm_engine_kwargs=options, vllm_mode="server"), ""),  # started elsewhere
            ({}, "TRL", swift(vllm_engine_kwargs=options), ""),
        )
    ),
    *(
        ({}, "ms-swift", swift(vllm_engine_kwargs=options), "")
        for options in (
            {"enable_return_routed_experts": "true"},
            '{"enable_return_routed_experts": true}',
            {"aux_output_config": ASKS},
        )
    ),
    ({"sglang": "0.5.7"}, "slime", slime(), r"SGLang 0\.5\.7 is older than 0\.5\.8"),
    # on Ascend both tables decide
    (ASCEND, "ms-swift", swift(vllm_quantization="ascend"), "no quantized experts"),
    (ASCEND, "ms-swift", swift(vllm_enable_dbo=True), "vllm_enable_dbo"),
    (NIGHTLY, "ms-swift", swift(vllm_data_parallel_size=2), ""),  # which release, nobody tells
    (NIGHTLY, "ms-swift", swift(vllm_pipeline_parallel_size=2), "vllm_pipeline_parallel_size"),
]


@pytest.mark.parametrize(("releases", "framework", "config", "words"), ROWS)
def test_a_plan_without_routes_is_refused_by_the_frameworks_key_and_a_right_one_let_through(
    here: dict[str, str], monkeypatch: Any, releases: dict[str, str], framework: Any, config: Any, words: str
) -> None:
    here.update(releases)
    monkeypatch.setattr(engines.plugin, "left_out", lambda: None)
    refused = pytest.raises(ReplayError, match=f"{framework}'s config.*: .*{words}")
    with refused if words else nullcontext():
        engines.check(framework, config)


def test_without_strict_a_release_without_routes_is_an_error_in_the_log_and_without_a_release_nothing(
    here: dict[str, str], caplog: Any, monkeypatch: Any
) -> None:
    here["sglang"] = "0.5.7"
    monkeypatch.setenv("NPU_REPLAY_STRICT", "0")
    with caplog.at_level(logging.ERROR):
        engines.check("slime", slime())
    assert "SGLang 0.5.7 is older" in caplog.text
    here.clear()
    assert engines.refusal(engines.plan_of("slime", slime(sglang_mem_fraction_static=0.5))) is None


def test_on_ascend_a_capture_mends_what_it_does(here: dict[str, str], monkeypatch: Any) -> None:
    here.update(ASCEND)
    monkeypatch.setattr(engines.plugin, "left_out", lambda: None)
    monkeypatch.setattr(engines.plugin, "wanted", lambda: True)
    engines.check("ms-swift", swift(vllm_quantization="ascend"))
    with pytest.raises(ReplayError, match="vllm_enable_dbo"):
        engines.check("ms-swift", swift(vllm_enable_dbo=True))
