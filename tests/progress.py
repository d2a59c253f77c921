"""Print one line for each file of tests when it is done, where several workers run them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest


class Progress:
    """Counts the tests of each file, in the place of a dot for each test."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._left: Counter[str] = Counter()
        self._counts: dict[str, Counter[str]] = {}
        self._all = self._done = 0

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        if not self._all:  # each worker collects the same
            self._left.update(one.partition("::")[0] for one in ids)
            self._all = len(ids)

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, str] | None:
        """Print no letter for a test that passed or was skipped."""
        if (report.when == "call" and report.passed) or (report.skipped and not hasattr(report, "wasxfail")):
            return report.outcome, "", ""
        return None

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "teardown" and (report.when == "call" or not report.passed):
            name = report.nodeid.partition("::")[0]
            counts = self._counts.setdefault(name, Counter())
            counts[report.outcome] += 1
            self._done += 1
            self._left[name] -= 1
            if not self._left[name]:
                told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
                self._config.get_terminal_writer().line(f"{self._done:6}/{self._all}  {name}: {told}")
