"""verl's trainer with a live vLLM, in the environment that ci/live.sh makes."""

from __future__ import annotations

from pathlib import Path

import pytest

import needed

NEEDED = ("vllm", "ray", "mbridge", "transfer_queue", "verl.trainer")


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return needed.module(module_path, parent, needed.missing(*NEEDED), "Run ci/live.sh: it has all of them")
