"""Versions and rows of a table of releases, and the arguments that an engine is started with."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from npu_replay.rollout.engine_plan import EngineArguments
from npu_replay.rollout.release_rules import Releases, release, tells_release


@pytest.mark.parametrize(
    ("versions", "numbers"),
    [
        (("0.23", "0.23.post1", "v0.23.0", "0.23.0rc1", "0.23+cu128", "0.23b2"), (0, 23, 0)),
        (("0.5.12.post1", "v0.5.12", "0.5.12.dev12+g0f3a"), (0, 5, 12)),
        (("1",), (1, 0, 0)),
        (("unknown", "nightly-20260101", ""), (0, 0, 0)),
        (("9" * 5000,), (999_999_999, 0, 0)),
    ],
)
def test_releases_are_compared_by_their_first_numbers(
    versions: tuple[str, ...], numbers: tuple[int, int, int]
) -> None:
    assert {release(version) for version in versions} == {numbers}


@pytest.mark.parametrize(
    ("numbers", "tell", "do_not"),
    [
        (
            2,
            ("0.23", "0.23.0rc1", "v0.16.0", "0.33.0+cu128", "0.22.1.dev5+gab"),
            ("", "nightly", "0.1.dev123+g1a2b3c", "0.12.dev1", "0.0.0", "7", None),
        ),
        (3, ("0.5.23", "0.5.12.post1", "0.5.23.dev3+gabc"), ("0.5", "0.5.dev1", "latest", "0.0.0")),
    ],
)
def test_a_version_tells_its_release_or_not(
    numbers: int, tell: tuple[Any, ...], do_not: tuple[Any, ...]
) -> None:
    for version in (*tell, *do_not):
        assert tells_release(version, numbers) == (version in tell), version


def test_a_row_holds_from_its_first_release_to_before_the_next() -> None:
    """A version that isn't told may be any; a release candidate is its release."""
    row = Releases(since="0.21.0", until="0.22.0")
    for version in ("0.21.0rc1", "0.21.0", "0.21.7+cu128", "v0.21.1.dev3", "nightly", ""):
        assert row.holds(version), version
    for version in ("0.20.2.post1", "0.22.0rc1", "0.22.0"):
        assert not row.holds(version), version


def test_a_row_of_one_device_holds_there_and_where_nobody_says() -> None:
    row = Releases(device="cpu")
    assert [row.holds("0.21.0", device) for device in ("cpu", "", "npu")] == [True, True, False]


def test_a_server_is_started_with_what_was_planned() -> None:
    """As vLLM's server reads it: --no-... for what is off, several words for a list, JSON for a dict."""
    plan = {
        "enable_return_routed_experts": True,
        "async_scheduling": False,
        "gpu_memory_utilization": 0.9,
        "model": "a model",
        "download_dir": Path("/models"),
        "seed": None,
        "empty": [],
        "served_model_name": ["one", "two"],
        "compilation_config": {"level": 3, "sizes": [1, 2]},
        "aux_output_config": MappingProxyType({"max_bytes": 1 << 40}),
    }
    assert EngineArguments(plan).command_line() == [
        *("--enable-return-routed-experts", "--no-async-scheduling", "--gpu-memory-utilization", "0.9"),
        *("--model", "a model", "--download-dir", "/models", "--served-model-name", "one", "two"),
        *("--compilation-config", '{"level": 3, "sizes": [1, 2]}'),
        *("--aux-output-config", '{"max_bytes": 1099511627776}'),
    ]
