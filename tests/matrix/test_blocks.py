"""record and replay on the Megatron-core on the path: ways to route, to recompute, orders of backward."""

from __future__ import annotations

from typing import Any

import pytest

import npu_replay
from dealt_cases import dealt
from zoo.gpt import (
    ALL_RECOMPUTE,
    VARIANTS,
    build,
    check_record_and_replay,
    random_routes,
    same,
)

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.usefixtures("megatron"),
    # torch says so of a reentrant checkpoint inside another's first pass, which runs under no_grad
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]

ORDERS = ["each", "sum", "reversed", "thread"]
AXES = (list(VARIANTS), [None, *ALL_RECOMPUTE], ORDERS)


def _case(variant: str, recompute: str | None, order: str) -> Any:
    shows = ["blocks", *(["recompute"] if recompute else []), *(["order"] if order != "each" else [])]
    marks = [pytest.mark.capability(name) for name in shows]
    return pytest.param(variant, recompute, order, marks=marks, id=f"{variant}-{recompute}-{order}")


@pytest.mark.parametrize(("variant", "recompute", "order"), [_case(*case) for case in dealt(*AXES)])
def test_a_record_changes_nothing_and_every_recompute_replays_its_own_forward(
    variant: str, recompute: str | None, order: str
) -> None:
    """Foreign routes with recompute give the gradients of the same without it, and the routers show them."""
    trainer = build(VARIANTS[variant], recompute)
    plain = build(VARIANTS[variant])
    foreign = random_routes(check_record_and_replay(trainer, order))
    with npu_replay.observe(plain.model) as seen, npu_replay.replay(plain.model, foreign):
        expected = plain.run(order)
    if "capacity" not in variant:  # that drops some
        assert npu_replay.compare(seen.shown, foreign).differing == 0
    with npu_replay.replay(trainer.model, foreign):
        assert same(trainer.run(order), expected)
