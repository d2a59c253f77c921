"""How much of a test runs in .ci/run, and how much in ci/all.sh alone.

    @pytest.mark.choice            of the product of its tables, cases in which any two values meet; of two
                                   tables, every value once
    @pytest.mark.choice(every=4)   every fourth case
    @examples(100)                 a fifth of the examples that hypothesis draws

The cases that are left out are marked `long`.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from hypothesis import settings

WHOLE = os.environ.get("NPU_REPLAY_TESTS") == "whole"
"""ci/test.sh --all sets it."""


def examples(most: int) -> settings:
    """Return the settings of a test of hypothesis that has `most` examples in ci/all.sh."""
    from hypothesis import HealthCheck, settings  # tests on a device have pytest alone

    count = most if WHOLE else max(20, most // 5)
    return settings(max_examples=count, suppress_health_check=[HealthCheck.too_slow])


def without_clocks() -> None:
    """Let hypothesis fail no test because it took long: a busy machine isn't a defect."""
    with suppress(ModuleNotFoundError):  # tests on a device have pytest alone
        from hypothesis import HealthCheck, settings

        slow = [HealthCheck.too_slow]
        settings.register_profile("without clocks", deadline=None, suppress_health_check=slow)
        settings.load_profile("without clocks")


def some(most: int) -> int:
    """Return how many of `most` cases drawn by chance a test runs."""
    return most if WHOLE else (most + 2) // 3


def mark_long(items: Iterable[pytest.Item]) -> None:
    """Mark as long what tests with the marker `choice` leave out of .ci/run."""
    tests: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("choice") is not None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        every = cases[0].get_closest_marker("choice").kwargs.get("every")
        values = [case.callspec.params for case in cases]
        places = set(range(0, len(cases), every) if every else chosen(values))
        for place, case in enumerate(cases):
            if place not in places:
                case.add_marker(pytest.mark.long)


def chosen(cases: Sequence[Mapping[str, Any]]) -> list[int]:
    """Return the places of few cases that cover what meets in all of them.

    Args:
        cases: the values of each case, by name.
    """
    numbers: dict[str, dict[int, int]] = {name: {} for name in cases[0]}
    numbered = [
        {name: seen.setdefault(id(case[name]), len(seen)) for name, seen in numbers.items()} for case in cases
    ]
    # Names that change together are of one table.
    tables = {tuple(case[name] for case in numbered): name for name in numbers}.values()
    together = 1 if len(tables) < 3 else 2
    met = [set(combinations([(name, case[name]) for name in tables], together)) for case in numbered]
    left = set().union(*met)
    places = []
    order = list(range(len(cases)))
    random.Random(0).shuffle(order)  # of two like tables, each value would meet itself
    while left:
        place = max(order, key=lambda candidate: len(met[candidate] & left))
        places.append(place)
        left -= met[place]
    return places
