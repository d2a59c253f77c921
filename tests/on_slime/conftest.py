"""slime in these tests: its source is on the path (ci/frameworks.sh slime FOLDER), and a Megatron-core."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


class _Skipped(pytest.Module):
    """A test file that can't even be imported."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(
            "slime is not importable, which is in no registry: ci/frameworks.sh slime FOLDER MEGATRON",
            allow_module_level=True,
        )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    found = find_spec("slime")
    return None if found is not None and found.origin else _Skipped.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.slime)
            item.add_marker(pytest.mark.megatron)
