"""Which cases .ci/run has of tests with many; the others are in ci/all.sh."""

from __future__ import annotations

from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import choice

CI = Path(__file__).parents[2] / "ci"


@pytest.mark.parametrize("sizes", [(2, 2, 2), (8, 6, 3), (2, 3, 4, 5)])
def test_any_two_values_of_three_tables_or_more_meet(sizes: tuple[int, ...]) -> None:
    cases = [dict(enumerate(one)) for one in product(*map(range, sizes))]
    found = [cases[place] for place in choice.chosen(cases)]  # type: ignore[arg-type]
    pairs = [{pair for case in part for pair in combinations(case.items(), 2)} for part in (cases, found)]
    assert pairs[0] == pairs[1]
    assert len(found) < len(cases) or sizes == (2, 2, 2)


class Item:
    def __init__(self, number: int, every: int) -> None:
        self.nodeid = f"tests/test_it.py::test_it[{number}]"
        self.marks = [pytest.mark.choice(every=every)]
        self.callspec = SimpleNamespace(params={"number": number})

    def get_closest_marker(self, name: str) -> Any:
        return next((one.mark for one in self.marks if one.name == name), None)

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark)


def test_what_is_left_out_is_long_and_ci_all_runs_it() -> None:
    items: Any = [Item(number, every=3) for number in range(7)]
    choice.mark_long(items)
    assert [number for number, one in enumerate(items) if not one.get_closest_marker("long")] == [0, 3, 6]
    script = (CI / "test.sh").read_text(encoding="utf-8")
    assert "export NPU_REPLAY_TESTS=whole" in script.partition("all() {")[2].partition("}")[0]
    assert "ci/test.sh --all" in (CI / "all.sh").read_text(encoding="utf-8")
