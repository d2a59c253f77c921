"""EngineArguments: what a server is started with is what was planned, word for word."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from npu_replay import ReplayError
from npu_replay.rollout.launch import EngineArguments

PLAN = {
    "enable_return_routed_experts": True,
    "async_scheduling": False,
    "tensor_parallel_size": 4,
    "gpu_memory_utilization": 0.9,
    "model": "a model",
    "download_dir": Path("/models"),
    "seed": None,
    "served_model_name": ["one", "two"],
    "compilation_config": {"level": 3, "sizes": [1, 2]},
}


def read_by_argparse(words: list[str]) -> dict[str, Any]:
    """As vLLM's server reads them: --no-... for what is off, several values for a list, JSON for a dict."""
    parser = argparse.ArgumentParser(exit_on_error=False)
    for name in ("enable-return-routed-experts", "async-scheduling"):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction)
    for name, kind in (
        ("tensor-parallel-size", int),
        ("gpu-memory-utilization", float),
        ("model", str),
        ("download-dir", Path),
        ("compilation-config", json.loads),
    ):
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--seed", type=int)
    return vars(parser.parse_args(words))


def test_a_server_reads_what_was_planned() -> None:
    assert read_by_argparse(EngineArguments(PLAN).command_line()) == PLAN
    mapping = MappingProxyType({"max_bytes": 1 << 40})
    words = EngineArguments({"tp_size": 8, "empty": [], "aux_output_config": mapping}).command_line()
    assert words == ["--tp-size", "8", "--aux-output-config", '{"max_bytes": 1099511627776}']


def test_what_is_off_is_left_out_where_a_server_knows_no_negation() -> None:
    """SGLang's options are store_true: --no-... would stop it."""
    plan = {"disable_radix_cache": False, "enable_return_routed_experts": True}
    assert EngineArguments(plan, negates=False).command_line() == ["--enable-return-routed-experts"]
    assert EngineArguments(plan).command_line()[0] == "--no-disable-radix-cache"


@pytest.mark.parametrize(
    "value", [object(), {"a": object()}, {1, 2}, [object()], b"x"], ids=lambda v: type(v)
)
def test_what_is_no_text_is_refused_by_name(value: Any) -> None:
    with pytest.raises(ReplayError, match="compilation_config: this argument can't be given"):
        EngineArguments({"compilation_config": value}).command_line()


def test_it_is_frozen_and_says_nothing_of_its_own() -> None:
    plain = EngineArguments({"a": 1})
    assert dict(plain.environment) == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        plain.arguments = {}  # type: ignore[misc]
