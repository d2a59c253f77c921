"""npu_replay, MindSpeed and Megatron may be imported in any order, and repatch() called at any time.

Covered: all six orders of the three imports; three of them also with a repatch right after MindSpeed's
import, before or after npu_replay's; and in each process, one after the other: no repatch after the model
was built, one, one between record and replay, and a model that was built after them. Recompute is full
throughout. Then what becomes of a config's flags in the hands of MindSpeed and of people, and what is left
after uninstall(). At the end what users run into: a MindSpeed that is half imported, a repatch in a block.
"""

from __future__ import annotations

import re
from itertools import permutations
from typing import Any

import pytest

from on_mindspeed import processes

pytestmark = [pytest.mark.megatron, pytest.mark.slow]

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
    "recorded_is_shown": 0,
    "layers": [0, 1, 2],
    "calls": [2] * 9,  # three micro-batches of three layers, each once more in the recompute
    "replayed_differs": 0,
    "replayed_calls": [2] * 9,
    "live_again": True,
}
KEPT: dict[str, Any] = {
    "not given": False,
    "given": True,
    "the other name": True,
    "copy": True,
    "deepcopy": True,
    "asdict": True,
    "replace": True,
    "replace did": 3,
    "its own class": True,
    "its fields": True,
    "signature": True,
    "on the class": False,
    "repatch": True,
    "repatch with arguments": True,
    "the arguments too": 4,
}


def _named(value: Any) -> str:
    return ("repatched-early" if value else "") if isinstance(value, bool) else "-".join(value)


@pytest.mark.parametrize(("order", "early"), ORDERS, ids=_named)
def test_any_order_of_imports_keeps_flags_and_replays(
    product: str, order: tuple[str, ...], early: bool
) -> None:
    """T5; and a wrap that a repatch throws away, a class attribute or signature that MindSpeed trips on."""
    found = processes.run(product, "worker:orders", {"order": order, "early": early}, timeout=280)
    for phase in PHASES:
        assert found[phase].pop("live_differs") > 0, "the changed routers chose as before"
        assert found[phase] == RIGHT, phase
    assert found["torch restored"]
    assert lost(found["flags"]) == {}
    for name in ("TransformerConfig", "MLATransformerConfig"):
        ways = dict(found[name])
        own, bare = ways.pop("subclass"), ways.pop("subclass, nothing given")
        assert ways == KEPT, name
        # MindSpeed up to 2.3.0 lets nobody build a subclass of his own, with a flag or without.
        assert own is True or ("AttributeError" in own and own == bare), name
    assert found["undone"] == [False, False]


def lost(flags: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The flags that a config was given and didn't keep, by when."""
    return {
        f"{flag} {when}": value
        for when, kept in flags.items()
        for flag, value in kept.items()
        if value is not True
    }


@pytest.mark.first_release
def test_a_mindspeed_that_was_half_imported_is_refused(product: str) -> None:
    found = processes.run(product, "worker:bad_input", {"case": "half imported"})
    message = r"RouterError: .*half imported\. Expected all \d+ of its patches in place, got 3, without "
    assert re.match(message, found["error"]), found["error"]
    assert "python -c 'import mindspeed.megatron_adaptor'" in found["error"]
    assert found["hooks"] == 0


@pytest.mark.first_release
def test_a_repatch_in_the_middle_of_a_block_names_the_function_that_came(product: str) -> None:
    found = processes.run(product, "worker:bad_input", {"case": "repatch in a block"})
    assert re.match(
        r"RouterError: .*micro-batch 1, (topk_\w+|TopKRouter\.routing): "
        r"the code that routes was replaced inside an open block\. "
        r"Expected megatron\.core\.\S+, got another mindspeed\.\S+\. Usual cause: MindSpeed's repatch\(\)",
        found["error"],
    ), found["error"]
    assert found["hooks"] == 0
    assert found["usable"] == ""
