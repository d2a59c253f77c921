"""vLLM and SGLang in these tests: a release of each is on the path (ci/engines.sh puts them there).

Neither needs a GPU for what is used here. What an engine imports is in the engine-tests extra.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import needed

HERE = Path(__file__).parent
CURE = "Put a release on PYTHONPATH (ci/engines.sh does) and install the engine-tests extra"


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    engine = module_path.stem.removeprefix("test_")
    return needed.module(module_path, parent, needed.missing(engine), CURE)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    needed.mark(items, HERE, "engines")
