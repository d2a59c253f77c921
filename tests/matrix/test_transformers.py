"""record and replay of small models of the transformers on the path."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ci_module import ci_module
from npu_replay.routers import find
from zoo import hugging_face as cases
from zoo.hugging_face import build, foreign, same, train
from zoo.outcome import check_foreign_routes, check_own_record

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {"qwen3_moe": "qwen3_moe", "mixtral": "mixtral", "deepseek_v3": "deepseek_v3-4-groups"}
"""Capability, and its case."""
CHECKPOINTS = {"no checkpoint": None, "reentrant": "reentrant", "non-reentrant": "non-reentrant"}
ORDERS = {"no checkpoint": "each", "reentrant": "another thread", "non-reentrant": "reversed"}
table = ci_module("models")
"""Of the backwards over several micro-batches."""


@pytest.mark.slow
@pytest.mark.capability("families")
def test_every_family_does_what_the_page_says() -> None:
    tried = [table.attempt(family) for family in table.families()]
    for page in (place.read_text(encoding="utf-8") for place in table.PAGES):
        assert page == table.pages.rewritten(page, table.MARKS, table.told(tried))
        assert "WRONG" not in page


def _case(family: str, checkpoint: str) -> Any:
    shows = [family, *(["checkpointing"] if CHECKPOINTS[checkpoint] else [])]
    return pytest.param(
        family,
        checkpoint,
        marks=[pytest.mark.capability(name) for name in shows],
        id=f"{family}-{checkpoint}",
    )


@pytest.mark.parametrize(
    ("family", "checkpoint"), [_case(family, checkpoint) for family in FAMILIES for checkpoint in CHECKPOINTS]
)
def test_a_record_changes_nothing_and_every_recompute_replays_its_own_forward(
    family: str, checkpoint: str
) -> None:
    model = build(FAMILIES[family], CHECKPOINTS[checkpoint])
    plain = build(FAMILIES[family])
    run = partial(train, model, ORDERS[checkpoint])
    recorded = check_own_record(model, run)
    layers = cases.FAMILIES[FAMILIES[family]][2]
    assert [part.layers for part in recorded] == [layers] * 5
    run_plain = partial(train, plain, ORDERS[checkpoint])
    replayed = check_foreign_routes(model, run, plain, run_plain, foreign(plain))
    assert not same(replayed, run())
    assert len(find([plain])[0]) == len(layers)
