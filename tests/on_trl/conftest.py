"""TRL is in no environment of this project's by itself: `ci/trl.sh` makes one that has it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

LACKING = [name for name in ("trl", "peft", "transformers") if importlib.util.find_spec(name) is None]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason=f"{', '.join(LACKING)} can't be imported; ci/trl.sh runs these tests")
    for item in items:
        if LACKING and Path(__file__).parent in item.path.parents:
            item.add_marker(skip)
