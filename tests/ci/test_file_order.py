"""A quick run shows progress early, and no run has one worker alone for long at its end."""

from __future__ import annotations

import heapq
from pathlib import Path

import pytest

from file_order import in_order

LONG = {Path(f"long_{number}.py"): (10, 60.0) for number in range(13)}
SHORT = {Path(f"short_{number:03}.py"): (80, 6.0) for number in range(100)}
FILES = LONG | SHORT
"""How many tests each has, and how many seconds they take: as here, long files have few."""


def run(*, quick: bool, workers: int = 2) -> tuple[list[tuple[float, int]], float]:
    """When how many more tests were done, and how long the first worker to end waited for the last one."""
    places = in_order(sorted(FILES), set(LONG), quick)
    free, done = [0.0] * workers, []
    for file in sorted(FILES, key=lambda one: places[one]):
        tests, seconds = FILES[file]
        ended = heapq.heappop(free) + seconds
        heapq.heappush(free, ended)
        done.append((ended, tests))
    return done, max(free) - min(free)


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5, 0.75])
def test_a_quick_run_shows_progress_from_the_beginning(share: float) -> None:
    done, _ = run(quick=True)
    end = max(when for when, _ in done)
    tests = sum(count for when, count in done if when <= share * end)
    assert tests / sum(count for _, count in done) > 0.6 * share


@pytest.mark.parametrize("quick", [True, False])
def test_no_worker_waits_longer_than_a_short_file_takes(quick: bool) -> None:
    assert run(quick=quick)[1] <= 6


def test_all_the_slow_files_come_first_where_the_slow_tests_run() -> None:
    places = in_order(sorted(FILES), set(LONG), quick_run=False)
    assert max(places[one] for one in LONG) < min(places[one] for one in SHORT)


def test_a_run_of_slow_files_alone_has_an_order() -> None:
    assert list(in_order(sorted(LONG), set(LONG), quick_run=True)) == sorted(LONG)
