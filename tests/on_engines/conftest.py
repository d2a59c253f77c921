"""vLLM and SGLang in these tests: a release of each is on the path (with_engines of ci/environment.sh).

Neither needs a GPU for what is used here. What an engine imports is in the engine-tests extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ENGINES = {"test_vllm.py": "vllm", "test_sglang.py": "sglang"}


class _Skipped(pytest.Module):
    """A test file that can't even be imported."""

    def collect(self) -> Iterator[pytest.Item]:
        engine = ENGINES[self.path.name]
        pytest.skip(
            f"{engine} isn't importable: put a release on PYTHONPATH, as with_engines of ci/environment.sh "
            "does, and install the engine-tests extra",
            allow_module_level=True,
        )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    if module_path.name not in ENGINES:
        return None
    spec = find_spec(ENGINES[module_path.name])
    there = spec is not None and spec.origin is not None
    return None if there else _Skipped.from_parent(parent, path=module_path)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.engines)
