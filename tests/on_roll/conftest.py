"""ROLL in these tests: its source is on the path (ci/frameworks.sh roll FOLDER), and what it imports."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NEEDED = ("roll.distributed", "ray", "tensordict", "accelerate", "transfer_queue", "opentelemetry.exporter")


def _is_there(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # what it is a part of
        return False


absent = [name for name in NEEDED if not _is_there(name)]


class _Skipped(pytest.Module):
    """A test file that can't even be imported."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(
            f"not importable: {', '.join(absent)}. ROLL is in no registry: ci/frameworks.sh roll FOLDER",
            allow_module_level=True,
        )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    return _Skipped.from_parent(parent, path=module_path) if absent else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.roll)
