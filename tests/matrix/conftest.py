"""Each test here shows capabilities of the release on the path; what came of it is written for the matrix.

NPU_REPLAY_MATRIX_RESULT=FILE writes it. NPU_REPLAY_MATRIX_CASES=all runs every case, a number the choice of
that hand (dealt_cases.py).
"""

from __future__ import annotations

import gc
import json
import os
import platform
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from capabilities import CAPABILITIES

HERE = Path(__file__).parent
_MARK = "capability"
_found: dict[str, dict[str, Any]] = {}
_counts = {"passed": 0, "failed": 0, "skipped": 0}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.user_properties += [(_MARK, name) for name in _capabilities(item)]


@pytest.fixture(autouse=True)
def _no_losses_of_a_smaller_model() -> None:
    """Megatron keeps aux losses for the process, in tensors of the first model's number of layers."""
    for name in ("megatron.core.parallel_state", "megatron.core.transformer.moe.moe_utils"):
        module: Any = sys.modules.get(name)
        if hasattr(module, "get_moe_metrics_tracker"):  # from 0.18 on
            module.get_moe_metrics_tracker().metrics.clear()
        elif hasattr(module, "get_moe_layer_wise_logging_tracker"):
            module.get_moe_layer_wise_logging_tracker().clear()


def pytest_collection_finish() -> None:
    gc.freeze()  # a collection that looks at all of torch and Megatron takes 0.3 s


def _capabilities(item: pytest.Item) -> list[str]:
    names = [str(mark.args[0]) for mark in item.iter_markers(_MARK)]
    known = {name for rows in CAPABILITIES.values() for name in rows}
    if not names or not known.issuperset(names):
        raise pytest.UsageError(
            f"{item.nodeid} shows {names}: one or more of tests/capabilities.py are wanted"
        )
    return names


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Count a test once: where it ran, or where it ended before or failed after that."""
    if report.when != "call" and report.passed:
        return
    shown = [str(name) for kind, name in report.user_properties if kind == _MARK]
    _counts[report.outcome] += bool(shown)
    for name in shown:
        entry = _found.setdefault(name, {"passed": 0, "failed": [], "skipped": []})
        if report.passed:
            entry["passed"] += 1
        else:
            entry[report.outcome].append(_reason(report) if report.skipped else report.nodeid)


def _reason(report: pytest.TestReport) -> str:
    _, _, why = report.longrepr if isinstance(report.longrepr, tuple) else ("", 0, str(report.longrepr))
    return why.removeprefix("Skipped: ")


def pytest_sessionfinish() -> None:
    path = os.environ.get("NPU_REPLAY_MATRIX_RESULT")
    if path:
        versions = {}
        for name in ("torch", "megatron-core", "transformers"):
            with suppress(PackageNotFoundError):
                versions[name] = version(name)
        report = {"python": platform.python_version(), **versions, "tests": _counts, "capabilities": _found}
        Path(path).write_text(json.dumps(report, indent=1), encoding="utf-8")
