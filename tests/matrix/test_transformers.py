"""record and replay of small models of the transformers on the path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import npu_replay
from ci_module import ci_module
from npu_replay.routers import find
from zoo import hugging_face as cases
from zoo.hugging_face import build, foreign, same, train

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
    order = ORDERS[checkpoint]
    untouched = train(model, order)
    with npu_replay.record(model) as recording:
        assert same(train(model, order), untouched)
    layers = cases.FAMILIES[FAMILIES[family]][2]
    assert [one.layers for one in recording.routes] == [layers] * 5
    with npu_replay.replay(model, recording.routes):
        assert same(train(model, order), untouched)
    others = foreign(plain)
    with npu_replay.observe(plain) as seen, npu_replay.replay(plain, others):
        expected = train(plain, order)
    assert npu_replay.compare(seen.shown, others).differing == 0
    assert not same(expected, untouched)
    with npu_replay.replay(model, others):
        assert same(train(model, order), expected)
    assert len(find([plain])[0]) == len(layers)
