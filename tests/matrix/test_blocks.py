"""record and replay on the Megatron-core on the path: ways to route, to recompute, orders of backward."""

from __future__ import annotations

from typing import Any

import pytest

from dealt_cases import dealt
from zoo.gpt import ALL_RECOMPUTE, VARIANTS, build, check_foreign_routes

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
    trainer = build(VARIANTS[variant], recompute)
    check_foreign_routes(trainer, build(VARIANTS[variant]), order, drops="capacity" in variant)
