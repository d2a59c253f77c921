"""Which cases .ci/run has of tests with many; the others are in ci/all.sh."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

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
