"""What every test relies on: Megatron's tests are skipped where there is no Megatron; the fixtures."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

import choice


def pytest_configure(config: pytest.Config) -> None:
    if not getattr(config.option, "numprocesses", None):
        choice.without_clocks()
        # It imports torch, for which the process that hands the tests to workers needn't wait.
        config.pluginmanager.import_plugin("common_fixtures")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files unread that have none of the tests that ci/test.sh asks for: of Megatron, or slow ones."""
    asked = str(config.option.markexpr)
    text = collection_path.read_text(encoding="utf-8") if collection_path.suffix == ".py" else ""
    if not text or collection_path.name in ("conftest.py", "__init__.py"):
        return None
    without_megatron = asked.startswith("megatron and ") and "mark.megatron" not in text
    without_slow = "(slow or packaging)" in asked and not re.search(r"mark\.(slow|packaging)", text)
    return True if without_megatron or without_slow else None


@pytest.hookimpl(tryfirst=True)  # before `-m long` is asked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    choice.mark_long(items)
    if find_spec("megatron") is not None and find_spec("megatron.core") is not None:
        return
    skip = pytest.mark.skip(
        reason="megatron.core is not importable: put megatron-core on PYTHONPATH (ci/test.sh does)"
    )
    for item in items:
        if item.get_closest_marker("megatron") is not None:
            item.add_marker(skip)
