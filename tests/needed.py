"""Folders of tests that need a product: skipped with the reason where it can't be imported, and marked.

A script of ci/ that is there to run them sets NPU_REPLAY_NEEDED: then they fail, with the same reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest


def missing(*names: str) -> list[str]:
    """Which of these can't be imported; nothing is, but what a dotted name is a part of.

    A folder of our own without __init__.py would be taken for a product of its name: that has a file.
    """
    return [name for name in names if not _is_there(name)]


def _is_there(name: str) -> bool:
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:  # what it is a part of
        return False
    return spec is not None and (spec.origin is not None or "." in name)


class Skipped(pytest.Module):
    """A test file that can't even be imported."""

    why = ""

    def collect(self) -> Iterator[pytest.Item]:
        if os.environ.get("NPU_REPLAY_NEEDED"):
            raise self.CollectError(self.why)
        pytest.skip(self.why, allow_module_level=True)


def module(path: Path, parent: Any, absent: Iterable[str], cure: str) -> pytest.Module | None:
    """For pytest_pycollect_makemodule: a skipped file where something is absent, None for pytest's own."""
    if not (names := ", ".join(absent)):
        return None
    skipped: Skipped = Skipped.from_parent(parent, path=path)
    skipped.why = f"not importable: {names}. {cure}"
    return skipped


def mark(items: Iterable[pytest.Item], folder: Path, *names: str) -> None:
    """For pytest_collection_modifyitems: mark the tests in a folder."""
    for item in items:
        if item.path.is_relative_to(folder):
            for name in names:
                item.add_marker(getattr(pytest.mark, name))


def hooks(conftest: str, names: Sequence[str], cure: str, *marks: str) -> tuple[Any, Any]:
    """A folder's pytest_pycollect_makemodule and pytest_collection_modifyitems."""
    absent = missing(*names)

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
        return module(module_path, parent, absent, cure)

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        mark(items, Path(conftest).parent, *marks)

    return pytest_pycollect_makemodule, pytest_collection_modifyitems
