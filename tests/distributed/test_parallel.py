"""Record, collect and replay in real parallel training: a job of several processes against one process alone.

parallel_cases.py is one process: it has the cases and what is checked in each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import jobs
from case_jobs import Notes, check, noted
from distributed.parallel_cases import CASES, REFERENCES, SPLITS, missing

KEPT = ("pp2-vp2-kept", "hybrid-pp2-kept")
"""What .ci/run has without recompute; of the other ways to split it has full recompute alone."""
LONG = ("pp2-block", "tp2-cp2-full", "pp2-vp2-ep2-full")
"""Whose parts are in other cases: Megatron's other recompute by layers, padded batches over both axes, and
virtual stages with expert parallel ranks (also in test_smoke.py).
"""

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.first_release,
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.timeout(1800),  # the first test of a size waits for all cases of that size
]


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process alone finds, for the cases that were selected."""
    folder = tmp_path_factory.mktemp("references")
    asked = [
        item.callspec.params["case"]  # type: ignore[attr-defined]
        for item in request.session.items
        if item.path == request.path
    ]
    jobs.run("distributed.parallel_cases:reference", {"references": str(folder), "cases": asked})
    return folder


def notes_of(ranks: int) -> Any:
    """A fixture: what each of so many ranks noted of each case that was selected."""

    @pytest.fixture(scope="module")
    def notes(request: Any, tmp_path_factory: pytest.TempPathFactory, references: Path) -> Notes:
        how: Any = {"imports": ["megatron.core.models.gpt"], "env": {REFERENCES: str(references)}}
        return noted(request, tmp_path_factory, "distributed.parallel_cases", ranks=ranks, cuda=True, **how)

    return notes


two = notes_of(2)
four = notes_of(4)


def cases(ranks: int) -> Iterator[Any]:
    for name in CASES:
        if name.rsplit("-", 1)[0] in SPLITS[ranks]:
            is_long = name in LONG or (name.endswith("-kept") and name not in KEPT)
            yield pytest.param(name, marks=[pytest.mark.long] if is_long else [])


@pytest.mark.parametrize("case", [*cases(2)])
def test_training_on_two_ranks_is_recorded_and_replayed(two: Notes, case: str) -> None:
    check_or_skip(two, case)


@pytest.mark.parametrize("case", [*cases(4)])
def test_training_on_four_ranks_is_recorded_and_replayed(four: Notes, case: str) -> None:
    check_or_skip(four, case)


def check_or_skip(notes: Notes, case: str) -> None:
    split, _ = CASES[case].args
    if why := missing(split):
        pytest.skip(why)
    check(notes, case)
