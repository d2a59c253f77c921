"""slime in these tests: its source is on the path (ci/frameworks.sh slime FOLDER), and a Megatron-core."""

from __future__ import annotations

from pathlib import Path

import pytest

import needed

HERE = Path(__file__).parent


CURE = "slime is in no registry: ci/frameworks.sh slime FOLDER MEGATRON"


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return needed.module(module_path, parent, needed.missing("slime"), CURE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needed.mark(items, HERE, "slime", "megatron")
