"""Which cases .ci/run has of tests with many; the others are in ci/all.sh."""

from __future__ import annotations

from itertools import combinations, product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import choice


@pytest.mark.parametrize("sizes", [(2, 2, 2), (8, 6, 3), (2, 3, 4, 5), (4, 4)])
def test_any_two_values_of_three_tables_or_more_meet(sizes: tuple[int, ...]) -> None:
    """Of two tables each value is there."""
    cases: Any = [dict(enumerate(values)) for values in product(*map(range, sizes))]
    kept = [cases[place] for place in choice.chosen(cases)]
    together = min(2, len(sizes) - 1)
    met = [{some for case in part for some in combinations(case.items(), together)} for part in (cases, kept)]
    assert met[0] == met[1]
    assert len(kept) < len(cases) or sizes == (2, 2, 2)


def test_what_is_left_out_is_long() -> None:
    marker = pytest.mark.choice(every=3).mark
    items: Any = [
        SimpleNamespace(nodeid=f"it[{number}]", get_closest_marker=lambda _: marker, add_marker=mock.Mock())
        for number in range(7)
    ]
    for item in items:
        item.callspec = SimpleNamespace(params={})
    choice.mark_long(items)
    assert [item.add_marker.call_count for item in items] == [0, 1, 1, 0, 1, 1, 0]
