"""ROLL in these tests: its source is on the path (ci/frameworks.sh roll FOLDER), and what it imports."""

from __future__ import annotations

from pathlib import Path

import pytest

import needed

HERE = Path(__file__).parent
NEEDED = ("roll.distributed", "ray", "tensordict", "accelerate", "transfer_queue", "opentelemetry.exporter")


absent = needed.missing(*NEEDED)
CURE = "ROLL is in no registry: ci/frameworks.sh roll FOLDER"


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return needed.module(module_path, parent, absent, CURE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needed.mark(items, HERE, "roll")
