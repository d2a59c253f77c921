"""npu_replay, MindSpeed and Megatron may be imported in any order, and repatch() called at any time.

Covered: all six orders of the three imports; three of them also with a repatch right after MindSpeed's
import, before or after npu_replay's; and in each process, one after the other: no repatch after the model
was built, one, one between record and replay, and a model that was built after them. Recompute is full
throughout.
"""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from on_mindspeed import processes

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

WORKER = "import_order_worker:main"
ORDERS = [(order, False) for order in permutations(("npu_replay", "mindspeed", "megatron"))] + [
    # MindSpeed's import imports Megatron, so only npu_replay may still come after this repatch.
    (("mindspeed", "npu_replay", "megatron"), True),
    (("npu_replay", "mindspeed", "megatron"), True),
    (("megatron", "mindspeed", "npu_replay"), True),
]
PHASES = [
    "no repatch",
    "repatch after the model was built",
    "another model",
    "model of a repatched config",
]
RIGHT = {
    "recorded": True,
    "layers": [0, 1],
    "calls": [4, 8],  # two micro-batches of two layers; in training each once more, in the recompute
    "perturbed differs": True,
    "replayed": True,
    "nothing left": True,
}


def _named(value: Any) -> str:
    return ("repatched-early" if value else "") if isinstance(value, bool) else "-".join(value)


@pytest.mark.parametrize(("order", "early"), ORDERS, ids=_named)
def test_any_order_of_imports_keeps_flags_and_replays(
    product: str, order: tuple[str, ...], early: bool
) -> None:
    found = processes.run(product, WORKER, {"order": order, "early": early}, timeout=280)
    assert {phase: found[phase] for phase in PHASES} == dict.fromkeys(PHASES, RIGHT)
    assert found["torch restored"]
    assert lost(found["flags"]) == {}


def lost(flags: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The flags that a config was given and didn't keep, by when."""
    return {
        f"{flag} {when}": value
        for when, kept in flags.items()
        for flag, value in kept.items()
        if value is not True
    }
