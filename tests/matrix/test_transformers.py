"""record and replay of small models of the transformers on the path."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import npu_replay
from ci_module import ci_module
from dealt_cases import HAND
from npu_replay.routers import find
from zoo import hugging_face as cases
from zoo.gpt import random_routes
from zoo.hugging_face import build, foreign, same, train

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {"qwen3_moe": "qwen3_moe", "mixtral": "mixtral", "deepseek_v3": "deepseek_v3-4-groups"}
"""Capability, and its case."""
CHECKPOINTS = {"no checkpoint": None, "reentrant": "reentrant", "non-reentrant": "non-reentrant"}
ORDERS = {"no checkpoint": "each", "reentrant": "another thread", "non-reentrant": "reversed"}
table = ci_module("models")
"""Of the backwards over several micro-batches."""


# What is used, seen past npu_replay: the ids that come to the experts


BLOCKS = (
    "qwen3_moe",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_next",
    "qwen3_omni_moe",
    "qwen3_vl_moe",
    "ernie4_5_moe",
    "flex_olmo",
    "hunyuan_v1_moe",
    "jamba",
    "minimax",
)
"""Those that choose inside their block in 4; all of them make a mask of the ids by `one_hot`."""
IN_TURN = [
    (family, way)
    for number, family in enumerate(BLOCKS)
    for turn, way in enumerate(CHECKPOINTS)
    if HAND == "all" or (number + int(HAND) - turn) % len(CHECKPOINTS) == 0
]
"""Each family with each way to checkpoint, or with the one whose turn it is on this release."""


@contextlib.contextmanager
def _masked() -> Iterator[list[torch.Tensor]]:
    """What `one_hot` is given, call by call."""
    seen: list[torch.Tensor] = []
    native = torch.nn.functional.one_hot

    def one_hot(ids: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(ids.detach().clone())
        return native(ids, *args, **kwargs)

    with mock.patch("torch.nn.functional.one_hot", one_hot):
        yield seen


@pytest.mark.capability("families")
@pytest.mark.parametrize(("family", "checkpoint"), IN_TURN)
def test_the_experts_get_the_routes_in_forward_and_recompute(family: str, checkpoint: str) -> None:
    model = table.build(family).train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    if CHECKPOINTS[checkpoint] is not None:
        kwargs = {"use_reentrant": checkpoint == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)
    batches = [torch.randint(1, 60, (2, length)) for length in (6, 9)]
    with npu_replay.record(model) as recording:
        sum(model(input_ids=batch)[0].float().square().mean() for batch in batches).backward()
    routes = random_routes(recording.routes)
    with npu_replay.replay(model, routes), _masked() as seen:
        sum(model(input_ids=batch)[0].float().square().mean() for batch in batches).backward()
    wanted = [one.layer_ids(layer).long() for one in routes for layer in one.layers]
    if CHECKPOINTS[checkpoint] is not None:
        wanted += wanted[::-1]  # backward begins with the last layer of the last micro-batch
    assert len(seen) == len(wanted) > 0
    assert all(torch.equal(one.reshape(ids.shape), ids) for one, ids in zip(seen, wanted, strict=True))


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
